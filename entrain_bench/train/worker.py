"""One rank, as the elastic agent starts it: ``python -m entrain_bench.train.worker FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from entrain_bench.train.handover import config_from_json, write_failure, write_outcome

WATCH_S = 1.0


def main(folder: str) -> None:
    """Train; rank 0 leaves the outcome in the folder, and a byte an iteration in ``progress``."""
    work, rank = Path(folder), int(os.environ["RANK"])
    # Python would see Ctrl-C only after the communication it waits in.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def report(_: int) -> None:
        if rank == 0:
            with (work / "progress").open("ab") as file:
                file.write(b".")

    try:
        # What importing goes wrong with is a failure of the rank, too.
        from entrain_bench.train.loop import train

        outcome = train(config_from_json((work / "config.json").read_text()), report)
        if outcome is not None:
            write_outcome(work, outcome)
    except Exception as error:
        write_failure(work, rank, error)
        raise


def _end_with(parent: int) -> None:
    """End this rank when the process that started it is gone."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
