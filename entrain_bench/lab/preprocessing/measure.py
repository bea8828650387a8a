"""Real training runs on pictures of several sizes, with inputs made by ranks, by their threads, by other processes."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import pandas as pd
from PIL import Image

from entrain_bench.base.errors import ExecutionError
from entrain_bench.lab.preprocessing.pictures import write_pictures
from entrain_bench.lab.processes import last_line, run_python
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import run_experiment
from entrain_bench.train.settings import PREPROCESSING

NUM_RANKS = 2
SCAN_S = 600.0
ITERATIONS = 4
BATCH = 8
# LLM tokens that a picture becomes, whatever its size: pictures differ in what they take to read and decode.
PICTURE_TOKENS = 64
SETTING = (
    "harness=train",
    "harness.device=cpu",
    "harness.data=files",
    f"harness.num_ranks={NUM_RANKS}",
    "model=tiny",
    f"cluster=hostx{NUM_RANKS}",
    "strategy=megatron",
    "workload=trace",
    f"workload.max_image_tokens={PICTURE_TOKENS}",
    "layout.tp=1",
    "layout.dp=1",
    f"global_batch={BATCH}",
    "microbatch_size=2",
    f"iterations={ITERATIONS}",
)


# Width and height in pixels: of web pages and datasets of photographs; of a screen; of a telephone's camera.
SIZES = ((640, 480), (1600, 1200), (3264, 2448))


@dataclass(frozen=True, slots=True)
class Prepared:
    """Pictures of one size: their shape trace, mean encoded size, and median CPU seconds to read one's pixels."""

    name: str
    trace: Path
    picture_bytes: float
    decode_s: float


def prepare_pictures(folder: Path, width: int, height: int, num: int, seed: int) -> Prepared:
    """Make pictures, and scan them as a user does; ``ExecutionError`` if they cannot be scanned."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{width}x{height}"
    path, trace = folder / f"{name}.parquet", folder / f"{name}-trace.parquet"
    num_bytes, first = write_pictures(path, num, width, height, seed)
    trace.unlink(missing_ok=True)
    scan = [f"source.path={path}", f"output={trace}", "tokenizer=bytes", *SETTING[4:6], "layout.tp=1"]
    log = folder / "scan.log"
    if wrong := run_python(["-m", "entrain_bench.cli", "trace", *scan], log, SCAN_S, {}):
        raise ExecutionError(f"{path}: cannot be scanned: {wrong} ({last_line(log)})")
    decode_s = []
    for content in first:
        started = process_time()
        np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        decode_s.append(process_time() - started)
    return Prepared(name, trace, num_bytes / num, float(np.median(decode_s)))


def measure(pictures: Sequence[Prepared], repetitions: int) -> Iterator[pd.DataFrame]:
    """Train every way on all pictures, in turn; yields all runs so far after each repetition.

    Columns: ``repetition``, ``size``, ``preprocessing``, metrics of the run, ``run_s`` and ``cpu_s`` of all its
    processes, start included, and ``load``, the machine's load average before it.
    """
    rows = []
    for repetition in range(repetitions):
        for prepared in pictures:
            # Another order every time: what else the machine does changes over minutes.
            for shift in range(len(PREPROCESSING)):
                mode = PREPROCESSING[(repetition + shift) % len(PREPROCESSING)]
                rows.append({"repetition": repetition, **_run(prepared, mode)})
                texts = (f"{key}={v:.4g}" if isinstance(v, float) else f"{v}" for key, v in rows[-1].items())
                print(*texts, flush=True)
        yield pd.DataFrame(rows)


def _run(prepared: Prepared, mode: str) -> dict[str, object]:
    overrides = [*SETTING, f"workload.path={prepared.trace}", f"harness.preprocessing={mode}"]
    (cell,) = compose_cells([*overrides, "mlflow=false"])
    load, started, cpu_s = os.getloadavg()[0], perf_counter(), children_cpu_s()
    outcome = run_experiment(cell.config)
    wanted = ("iteration_time_s", "input_stall_s", "input_stall_mean_s", "loss")
    found: dict[str, object] = {"size": prepared.name, "preprocessing": mode}
    found |= {name: outcome.metrics[name] for name in wanted}
    return found | {"cpu_s": children_cpu_s() - cpu_s, "run_s": perf_counter() - started, "load": load}


def children_cpu_s() -> float:
    """CPU time of what this process's children have started and seen end: ranks and producers, of their server."""
    ticks = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            values = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if values[1] == str(os.getpid()):
            ticks += int(values[13]) + int(values[14])
    return ticks / os.sysconf("SC_CLK_TCK")
