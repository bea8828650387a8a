"""Small data sets of every source whose records can be read by their numbers, scanned, and opened for training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TokenRules
from entrain_bench.specs.workload import Moved
from entrain_bench_workloads.dataset.formats import FileSource
from entrain_bench_workloads.dataset.samples import TraceSamples
from entrain_bench_workloads.trace import TraceWorkload
from support.datasets import picture_bytes, scan_here, sound_bytes, write_finevision, write_jsonl, write_tar
from support.specs import load

RULES: TokenRules = ModelSpec.from_config(load("model", "tiny_av")).tokens


def finevision(folder: Path) -> FileSource:
    """Two files of several row groups: several images, one, none."""
    folder.mkdir(exist_ok=True)
    for file in range(2):
        rows = []
        for number in range(9):
            seed = 9 * file + number
            sizes = [(60 + 10 * seed, 90), (70, 57)][: (1, 2, 0)[number % 3]]
            images = [picture_bytes(*size, seed=2 * seed + place) for place, size in enumerate(sizes)]
            rows.append((images, [f"text {seed}", "é" * number]))
        write_finevision(folder / f"train-{file}.parquet", rows, row_group=4)
    return FileSource(path=str(folder), text=["texts"], images="images")


def webdataset(folder: Path) -> FileSource:
    """Images and sounds with text; one sample is not good."""
    folder.mkdir(exist_ok=True)
    members = []
    for number in range(6):
        key = f"{'long/' * 30 if number == 3 else ''}s{number}"
        members.append((f"{key}.txt", f"text {number}".encode()))
        if number == 4:
            members.append((f"{key}.txt", b"again"))
        if number % 2:
            members.append((f"{key}.wav", sound_bytes(0.5 + number / 7, 200 * number)))
        else:
            members.append((f"{key}.png", picture_bytes(60 + number, 60, seed=number)))
    write_tar(folder / "shard.tar", members)
    return FileSource(path=str(folder / "shard.tar"))


def annotations(folder: Path, lines: bool) -> FileSource:
    """LLaVA's JSON, or the same as lines, with a folder of images."""
    (folder / "images").mkdir(parents=True)
    records: list[dict[str, Any]] = []
    for number in range(7):
        mark = "" if number == 5 else "<image>\n"
        records.append({"conversations": [{"from": "human", "value": f"{mark}q {number} [{{"}]})
        if number != 5:
            name = f"images/{number}.jpg"
            (folder / name).write_bytes(picture_bytes(60, 60 + number, seed=number, kind="JPEG", orientation=6))
            records[-1]["image"] = name
    path = folder / ("data.jsonl" if lines else "data.json")
    if lines:
        write_jsonl(path, records)
        path.write_text(path.read_text().replace("\n", "\n\n", 2))
    else:
        path.write_text(json.dumps(records, indent=1))
    return FileSource(path=str(path), text=["conversations"], images="image")


SOURCES: dict[str, Callable[[Path], Any]] = {
    "parquet": finevision,
    "tar": webdataset,
    "json": lambda folder: annotations(folder, lines=False),
    "jsonl": lambda folder: annotations(folder, lines=True),
}


def scanned(source: Any, output: Path, **options: Any) -> TraceWorkload:
    """The trace of a data set, as a workload."""
    return TraceWorkload(path=str(scan_here(source, output, **options)))


def opened(workload: TraceWorkload, vocab_size: int = 256, **moved: str) -> tuple[TraceSamples, SampleShapes]:
    """The samples of a trace that trains, and their shapes."""
    samples = workload.samples(RULES, vocab_size, Moved(**moved))
    assert isinstance(samples, TraceSamples)
    shapes = workload.source(RULES).shapes
    return samples, shapes
