"""Changes a folder of results again and again; names every change that a command believed, hid or ended at."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from .trial import Folder, problem_of


def main() -> int:
    """Try; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tamper", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="what is changed (default: 0)")
    parser.add_argument("--count", type=int, default=500, help="how many times (default: 500)")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="tamper-") as place:
        folder, wrong = Folder.made(Path(place) / "whole"), 0
        for number in range(options.count):
            if problem := problem_of(folder, Path(place) / "changed", options.seed, number):
                wrong += 1
                print(f"{number}: {problem[:1000]}", flush=True)
    print(f"{options.count} changes tried, {wrong} with a problem")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
