"""Random changes to the files of a folder of results."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from entrain_bench.records.sealed import sealed

type Chance = np.random.Generator
NUMBER = re.compile(rb"\d(?:[\d.e-]*\d)?")
# What a metric cannot be.
NO_METRIC = (-5, float("nan"), float("-inf"), "fast", None, True)


def kept_times(path: Path, content: bytes) -> None:
    """Replace a file by one that is as old; other links to it stay as they were."""
    before = path.stat()
    path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def pick(chance: Chance, root: Path, *patterns: str) -> Path:
    """One of the files of a folder."""
    files = sorted(path for pattern in patterns for path in root.glob(pattern))
    return files[int(chance.integers(len(files)))]


RECORDS, PLANS, TIMELINES, SWEEPS = "runs/*/*.json", "plans/*.json", "timelines/*/*.parquet", "sweeps/*.json"
ALL = (RECORDS, RECORDS, PLANS, TIMELINES, SWEEPS, "table.csv")


def flip_bits(chance: Chance, root: Path) -> str:
    """Flip one to three bits of a file."""
    path = pick(chance, root, *ALL)
    content = bytearray(path.read_bytes())
    for _ in range(int(chance.integers(1, 4))):
        content[int(chance.integers(len(content)))] ^= 1 << int(chance.integers(8))
    kept_times(path, bytes(content))
    return f"bits of {path.name}"


def truncate(chance: Chance, root: Path) -> str:
    """Cut a file off."""
    path = pick(chance, root, *ALL)
    content = path.read_bytes()
    kept_times(path, content[: int(chance.integers(len(content)))])
    return f"end of {path.name}"


def delete(chance: Chance, root: Path) -> str:
    """Delete a file."""
    path = pick(chance, root, *ALL)
    path.unlink()
    return f"no {path.name}"


def swap(chance: Chance, root: Path) -> str:
    """Copy a record, plan or timeline over that of another key, sometimes with the other key written into it."""
    pattern = (RECORDS, PLANS, TIMELINES)[int(chance.integers(3))]
    source, target = pick(chance, root, pattern), pick(chance, root, pattern)
    content = source.read_bytes()
    if chance.random() < 0.5:
        content = content.replace(source.stem.encode(), target.stem.encode())
    kept_times(target, content)
    return f"{source.name} over {target.name}"


def edit_digit(chance: Chance, root: Path) -> str:
    """Write another digit into a number of a record, plan, sweep or table."""
    path = pick(chance, root, RECORDS, RECORDS, PLANS, SWEEPS, "table.csv")
    content = path.read_bytes()
    numbers = [*NUMBER.finditer(content)]
    place = numbers[int(chance.integers(len(numbers)))].start()
    digit = str((int(content[place : place + 1]) + int(chance.integers(1, 10))) % 10).encode()
    kept_times(path, content[:place] + digit + content[place + 1 :])
    return f"digit {place} of {path.name}"


def edit_record(chance: Chance, root: Path) -> str:
    """Halve the time of a record, or write what no metric can be; the hash stays."""
    path = pick(chance, root, RECORDS)
    values = json.loads(path.read_text())
    name, value = _edit(chance, values)
    kept_times(path, json.dumps(values, indent=1, sort_keys=True).encode())
    return f"{name}={value} in {path.name}"


def edit_and_seal(chance: Chance, root: Path) -> str:
    """Write what no metric can be, and make the hash anew."""
    path = pick(chance, root, RECORDS)
    values = json.loads(path.read_text())
    del values["sha256"]
    name, value = _edit(chance, values, halves=False)
    kept_times(path, sealed(path.stem, values))
    return f"{name}={value} in {path.name}, sealed"


def edit_plan(chance: Chance, root: Path) -> str:
    """Change a layout or the time that planning took."""
    path = pick(chance, root, PLANS)
    values = json.loads(path.read_text())
    if chance.random() < 0.5:
        values["planning_time_s"] = NO_METRIC[int(chance.integers(len(NO_METRIC)))]
    else:
        values["layout"] = values["layout"].replace('"num_microbatches": ', '"num_microbatches": 1', 1)
        values["layout"] = values["layout"].replace('"pp": 1', '"pp": 2', 1)
    kept_times(path, json.dumps(values).encode())
    return f"plan {path.name}"


def delete_half(chance: Chance, root: Path) -> str:
    """Delete half of the records; index and tables still have them."""
    for path in sorted(root.glob(RECORDS)):
        if chance.random() < 0.5:
            path.unlink()
    return "half of the records"


def _edit(chance: Chance, values: dict[str, object], halves: bool = True) -> tuple[str, object]:
    metrics = values["metrics"]
    assert isinstance(metrics, dict)
    name = ("iteration_time_s", "planning_time_s", "mfu")[int(chance.integers(3))]
    value = NO_METRIC[int(chance.integers(len(NO_METRIC)))]
    metrics[name] = value = metrics[name] / 2 if halves and chance.random() < 0.5 else value
    return name, value


CHANGES: tuple[Callable[[Chance, Path], str], ...] = (
    *(flip_bits, flip_bits, truncate, truncate, delete, swap, swap, edit_digit, edit_digit),
    *(edit_record, edit_record, edit_and_seal, edit_plan, delete_half),
)
