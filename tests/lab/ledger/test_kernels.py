"""Published kernels and forwards against the cost model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrain_bench.config.compose import Composer
from entrain_bench.lab.ledger.jobs import load_book
from entrain_bench.lab.ledger.kernels import (
    KernelRow,
    compose_devices,
    kernels_by_source_table,
    plan_forwards,
    read_kernels,
    read_products,
)

ROWS = read_kernels()


def test_published_times_of_kernels_by_hand() -> None:
    assert product(100, 200, 300, 2.0).published_s == pytest.approx(2 * 100 * 200 * 300 / 2e12)
    full, masked = (KernelRow("", "attention", (64, causal, 0, 1000), 2.0, "").published_s for causal in (0, 1))
    assert full == pytest.approx(4 * 64 * 1000**2 / 2e12)
    assert masked == full / 2
    assert KernelRow("", "attention", (64, 0, 1, 1000), 2.0, "").published_s == pytest.approx(2.5 * full)


def product(m: int, n: int, k: int, tflops: float, device: str = "tiny", where: str = "here") -> KernelRow:
    return KernelRow(device, "product", (m, n, k), tflops, where)


@pytest.mark.parametrize("kind", ["product", "attention"])
@pytest.mark.parametrize("device", ["h100", "a100"])
def test_the_committed_constants_are_near_the_published_kernels(device: str, kind: str) -> None:
    rows = [row for row in ROWS if (row.device, row.kind) == (device, kind)]
    if not rows:
        assert (device, kind) == ("a100", "attention")
        return
    cluster = compose_devices([device], Composer())[device]
    errors = np.array([row.ratio(cluster) - 1.0 for row in rows])
    assert np.median(np.abs(errors)) < 0.08
    # Without a dependence on size it is far off, so the test can fail.
    sizes = ("gemm_half_flops", "gemm_half_width", "attention_half_tokens", "attention_half_head_dim")
    sizeless: Any = dict.fromkeys(sizes, 0.0)
    flat = replace(cluster, device=replace(cluster.device, **sizeless))
    assert np.median(np.abs([row.ratio(flat) - 1.0 for row in rows])) > np.median(np.abs(errors)) + 0.03


def test_forwards_are_means_over_microbatches_and_slower_at_half_the_rate() -> None:
    _, case, *others = plan_forwards(Composer())
    assert len(others) == 4
    cluster = case.truth.cluster
    half = replace(cluster.device, sustained_fraction=cluster.device.sustained_fraction / 2)
    slow = replace(case, truth=replace(case.truth, cluster=replace(cluster, device=half)))
    assert 20 < case.predicted_ms() < 400
    assert 1.5 * case.predicted_ms() < slow.predicted_ms() < 2 * case.predicted_ms()


def test_products_in_16_bits_on_known_devices_are_taken_and_count_once() -> None:
    products = read_products(load_book().products)
    assert {row.device for row in products} == {"a40", "a100", "h100"}
    (a40,) = (row for row in products if row.device == "a40")
    assert (a40.sizes, a40.tflops) == ((8000, 8000, 8000), 40.0)
    _, heading, lines = kernels_by_source_table([*ROWS, *ROWS, *products], Composer())
    assert len(heading) == len(lines[0])
    # Of ND A100 v4's eight products five are in both tables.
    assert sum(int(line[1]) for line in lines) == len(ROWS) + len(products) - 5
