"""Published rates of products (``experiments/ledger/matmul_tflops.csv``) as rows of kernels, and errors of kernels."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import config_tree
from entrain_bench.lab.ledger.kernels import KernelRow, Product, kernel_ratio
from entrain_bench.specs.cluster import ClusterSpec

TABLE = "matmul_tflops"
HALF_PRECISION = ("bf16", "fp16")


def read_products(devices: Mapping[str, str], path: Path | None = None) -> tuple[KernelRow, ...]:
    """Products in 16 bits on devices that have constants; others are left out.

    Args:
        devices: the name of a device's YAML by the text in ``gpu_type``.
        path: of the table; None for the committed one.
    """
    path = path or config_tree() / "ledger" / f"{TABLE}.csv"
    with path.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["gpu_type"] in devices and row["dtype"] in HALF_PRECISION]
    return tuple(
        KernelRow(
            devices[row["gpu_type"]],
            Product(int(row["m"]), int(row["n"]), int(row["k"]), float(row["tflops"])),
            f"{row['source']}, {row['where']}",
        )
        for row in rows
    )


def kernel_table(rows: Iterable[KernelRow], composer: Composer) -> tuple[str, Sequence[str], list[list[str]]]:
    """Title, headings and a row for every device, kind of kernel and source: number, median ratio and error, largest.

    A kernel that two tables have counts once.
    """
    clusters: dict[str, ClusterSpec] = {}
    distinct = {(row.device, row.kernel): row for row in reversed([*rows])}

    def group(row: KernelRow) -> tuple[str, str, str]:
        return row.device, row.kind, row.where.removeprefix("GitHub ").replace(",", " ").split()[0]

    lines = []
    for (device, kind, source), each in groupby(sorted(distinct.values(), key=group), key=group):
        if device not in clusters:
            clusters[device] = ClusterSpec.from_config(composer.run((f"cluster={device}x8",)).cluster)
        ratios = [kernel_ratio(row, clusters[device]) for row in each]
        errors = [abs(ratio - 1.0) for ratio in ratios]
        numbers = f"{median(ratios):.3f}", f"{median(errors):.1%}", f"{max(errors):.0%}"
        lines.append([f"{device.upper()}, {kind}, {source}", str(len(ratios)), *numbers])
    return "Kernels by source", ("device, kernel, source", "number", "median ratio", "median error", "largest"), lines
