"""``make preprocessing``: trains on pictures made on the spot; writes ``results/preprocessing.csv`` and a figure.

Inputs are made by the ranks, by their threads, and by processes apart, in turn, several times over.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from entrain_bench.lab.files import write_outputs
from entrain_bench.lab.preprocessing import figure
from entrain_bench.lab.preprocessing.measure import BATCH, ITERATIONS, NUM_RANKS, SIZES, measure, prepare_pictures

REPETITIONS = 5
PICTURES = 128
SEED = 0
COMMAND = "make preprocessing"


def main(arguments: Sequence[str]) -> int:
    """Make pictures, train on them, and draw what came out after each repetition."""
    parser = argparse.ArgumentParser(prog="python -m entrain_bench.lab.preprocessing", description=__doc__)
    parser.add_argument("--results-dir", type=Path, default=Path("results"), help="where files go")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="runs of each kind")
    parser.add_argument("--pictures", type=int, default=PICTURES, help="pictures of each size")
    options = parser.parse_args(arguments)
    for name in ("repetitions", "pictures"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}={getattr(options, name)}: must be at least 1")
    if sys.platform != "linux":
        parser.error(f"{COMMAND} needs Linux: it shares memory and reads CPU times in /proc")
    folder = options.results_dir / "preprocessing"
    print("making pictures", flush=True)
    prepared = [prepare_pictures(folder, *size, options.pictures, SEED) for size in SIZES]
    cores = len(os.sched_getaffinity(0))
    setting = {"ranks": [NUM_RANKS], "cores": [cores], "global_batch": [BATCH], "iterations": [ITERATIONS]}
    for runs in measure(prepared, options.repetitions):
        draw = partial(figure.draw, figure.summary(runs, prepared), cores)
        write_outputs(options.results_dir, runs, figure, draw, COMMAND, setting, [SEED], "measured")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
