"""Published kernels and forwards are what they are said to be, and wrong lines are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.lab.ledger.fit import fit_points
from entrain_bench.lab.ledger.jobs import load_book
from entrain_bench.lab.ledger.kernels import (
    KNOBS,
    PRODUCT,
    AttentionKernel,
    KernelRow,
    Product,
    kernels_by_source_table,
    plan_forward,
    read_forwards,
    read_kernels,
    read_products,
)
from entrain_bench.specs.cluster import ClusterSpec
from support.builders import tiny_cluster

ROWS = read_kernels()


def test_published_times_of_kernels_by_hand() -> None:
    assert Product(100, 200, 300, 2.0).published_s == pytest.approx(2 * 100 * 200 * 300 / 2e12)
    full, masked = (AttentionKernel(64, causal, False, 1000, 2.0).published_s for causal in (False, True))
    assert full == pytest.approx(4 * 64 * 1000**2 / 2e12)
    assert masked == full / 2
    assert AttentionKernel(64, False, True, 1000, 2.0).published_s == pytest.approx(2.5 * full)


def test_kernels_alone_do_not_know_of_training() -> None:
    row, cluster = KernelRow("tiny", Product(512, 512, 512, 1.0), "here"), tiny_cluster()
    slow = replace(cluster, device=replace(cluster.device, sustained_fraction=0.5))
    assert row.ratio(slow) == row.ratio(cluster)


def test_the_fit_finds_the_constant_that_made_the_products() -> None:
    device = replace(tiny_cluster().device, memory_bandwidth_bytes_per_s=1e18, gemm_half_flops=5e9)
    true = replace(tiny_cluster(), device=device)
    start = replace(true, device=replace(device, gemm_half_flops=2e9))
    points = []
    for size in (256, 512, 1024, 2048):
        seconds = KernelRow("tiny", Product(size, size, size, 1.0), "").ratio(true) * 2 * size**3 / 1e12
        row = KernelRow("tiny", Product(size, size, size, 2 * size**3 / seconds / 1e12), "here")
        points.append(row.sized_point(start))
    found = fit_points(points, KNOBS[PRODUCT], iterations=4)
    assert 2e9 * found.factors(device.name)[0] == pytest.approx(5e9, rel=0.02)


@pytest.mark.parametrize("kind", ["product", "attention"])
@pytest.mark.parametrize("device", ["h100", "a100"])
def test_the_committed_constants_are_near_the_published_kernels(device: str, kind: str) -> None:
    rows = [row for row in ROWS if (row.device, row.kind) == (device, kind)]
    if not rows:
        assert (device, kind) == ("a100", "attention")
        return
    cluster = ClusterSpec.from_config(Composer().run((f"cluster={device}x64",)).cluster)
    errors = np.array([row.ratio(cluster) - 1.0 for row in rows])
    assert np.median(np.abs(errors)) < 0.08
    # Without a dependence on size it is far off, so the test can fail.
    sizes = ("gemm_half_flops", "gemm_half_width", "attention_half_tokens", "attention_half_head_dim")
    sizeless: Any = dict.fromkeys(sizes, 0.0)
    flat = replace(cluster, device=replace(cluster.device, **sizeless))
    assert np.median(np.abs([row.ratio(flat) - 1.0 for row in rows])) > np.median(np.abs(errors)) + 0.03


def test_all_kernels_are_read() -> None:
    assert [sum(row.device == device for row in ROWS) for device in ("h100", "a100")] == [76, 5]
    assert all(row.where for row in ROWS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("h100,product,1,2,0,,,,,3,x", r"mine\.csv:2: k=0: must be a positive number"),
        ("h100,product,1,2,,,,,,3,x", r"mine\.csv:2: k=: must be a positive number"),
        ("h100,sum,1,2,3,,,,,3,x", r"mine\.csv:2: kernel=sum: unknown"),
        ("h100,attention,,,,64,true,false,512,many,x", r"mine\.csv:2: tflops=many: must be a positive number"),
    ],
)
def test_a_wrong_kernel_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("device,kernel,m,n,k,head_dim,causal,backward,tokens,tflops,where\n" + line)
    with pytest.raises(UserError, match=message):
        read_kernels(path)


def test_forwards_are_means_over_microbatches_and_slower_at_half_the_rate() -> None:
    rows = read_forwards()
    assert len(rows) == 6
    case = plan_forward(rows[1], Composer())
    whole = case.predicted_ms()
    assert 20 < whole < 400
    slow = case.predicted_ms(
        lambda cluster: replace(
            cluster, device=replace(cluster.device, sustained_fraction=cluster.device.sustained_fraction / 2)
        )
    )
    assert 1.5 * whole < slow < 2 * whole


def test_a_range_the_wrong_way_round_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("workload,model,module,least_ms,most_ms,where\ncoco,m,llm,3,2,x\n")
    with pytest.raises(UserError, match=r"mine\.csv:2: least_ms=3\.0: must be above 0 and at most most_ms=2"):
        read_forwards(path)


def test_products_in_16_bits_on_known_devices_are_taken_and_count_once() -> None:
    products = read_products(load_book().products)
    assert {row.device for row in products} == {"a40", "a100", "h100"}
    (a40,) = (row for row in products if row.device == "a40")
    assert a40.kernel == Product(8000, 8000, 8000, 40.0)
    _, heading, lines = kernels_by_source_table([*ROWS, *ROWS, *products], Composer())
    assert len(heading) == len(lines[0])
    # Of ND A100 v4's eight products five are in both tables.
    assert sum(int(line[1]) for line in lines) == len(ROWS) + len(products) - 5


def test_errors_of_kernels_are_of_the_device_alone() -> None:
    composer = Composer()
    cluster = ClusterSpec.from_config(composer.run(("cluster=a100x8",)).cluster)
    row = KernelRow("a100", Product(4096, 4096, 4096, 228.0), "somewhere, a table")
    _, _, ((name, number, ratio, error, largest),) = kernels_by_source_table([row], composer)
    assert (name, number) == ("A100, product, somewhere", "1")
    expected = row.ratio(cluster)
    assert float(ratio) == pytest.approx(expected, abs=1e-3)
    assert error == f"{abs(expected - 1):.1%}"
    assert largest == f"{abs(expected - 1):.0%}"
