"""One rank, as the elastic agent starts it: ``python -m entrain_bench.train.worker FOLDER``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from entrain_bench.train.launch import config_from_json, write_outcome
from entrain_bench.train.loop import train


@record
def main(folder: str) -> None:
    """Train; rank 0 leaves the outcome in the folder, and a byte an iteration in ``progress``."""
    work = Path(folder)
    first = os.environ["RANK"] == "0"

    def report(_: int) -> None:
        if first:
            with (work / "progress").open("ab") as file:
                file.write(b".")

    outcome = train(config_from_json((work / "config.json").read_text()), report)
    if first:
        write_outcome(work, outcome)


if __name__ == "__main__":
    main(sys.argv[1])
