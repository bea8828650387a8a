"""What worker processes are given to do in tests."""

import ctypes
import os
import signal
import time


def double(number: int) -> int:
    return 2 * number


def double_or_die(number: int) -> int:
    """Negative numbers kill the process that is given them."""
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


def keep_threads_waiting(_: int) -> None:
    """As compiled code that does not let Python's other threads run."""
    ctypes.PyDLL(None).sleep(1000)


class SlowToLoad:
    """A function that takes long to arrive, as one whose modules are still imported."""

    def __reduce__(self) -> tuple[object, ...]:
        return keep_threads_waiting, (0,)

    def __call__(self, _: int) -> None:
        """Do nothing."""


slow_to_load = SlowToLoad()
