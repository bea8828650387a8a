"""What worker processes are given to do in tests."""

import os
import signal
import time


def double(number: int) -> int:
    return 2 * number


def double_or_die(number: int) -> int:
    if number == -1:
        os.kill(os.getpid(), signal.SIGKILL)
    if number < -1:
        os._exit(7)
    return 2 * number


def process_and_threads(_: int) -> tuple[int, str]:
    time.sleep(0.2)
    return os.getpid(), os.environ["OMP_NUM_THREADS"]


def wait_forever(_: int) -> None:
    time.sleep(1000)
