"""The fit finds what made the data, keeps its bounds, and the published kernels are what they are said to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from entrain_bench.config.compose import Composer
from entrain_bench.lab.calibration.anchors import AttentionKernel, KernelPoint, Product, load_anchors
from entrain_bench.lab.calibration.fit import ForwardPoint, IterationPoint, fit_device, interval
from entrain_bench.specs.cluster import DeviceSpec
from support.builders import tiny_cluster

DEVICE = tiny_cluster().device
ANCHORS = load_anchors()


def line(factor: float) -> Callable[[DeviceSpec], float]:
    """Predicted over published of ``sustained_fraction`` times a number."""
    return lambda device: factor * device.sustained_fraction


def test_a_fitted_constant_is_the_one_of_least_squared_errors() -> None:
    # (2 s - 1)^2 + (3 s - 1)^2 is least at s = 5 / 13.
    found = fit_device(DEVICE, [line(2.0), line(3.0)], {"sustained_fraction": 0.8})
    assert found.sustained_fraction == 0.38
    assert replace(found, sustained_fraction=1.0) == DEVICE


def test_a_fraction_is_at_most_one() -> None:
    assert fit_device(DEVICE, [line(0.5)], {"sustained_fraction": 0.8}).sustained_fraction == 1.0


def test_the_fit_finds_the_constant_that_made_the_products() -> None:
    device = replace(DEVICE, memory_bandwidth_bytes_per_s=1e18)
    cluster, true = replace(tiny_cluster(), device=device), replace(device, gemm_half_flops=5e9)
    cases = []
    for size in (512, 1024, 2048):
        seconds = KernelPoint(cluster, Product(size, size, size, 1.0)).ratio(true) * 2 * size**3 / 1e12
        cases.append(KernelPoint(cluster, Product(size, size, size, 2 * size**3 / seconds / 1e12)))
    assert fit_device(device, [case.ratio for case in cases], {"gemm_half_flops": 1e9}).gemm_half_flops == 5e9


def test_published_times_of_kernels_by_hand() -> None:
    assert Product(100, 200, 300, 2.0).published_s == pytest.approx(2 * 100 * 200 * 300 / 2e12)
    full, masked = (AttentionKernel(64, causal, False, 1000, 2.0).published_s for causal in (False, True))
    assert full == pytest.approx(4 * 64 * 1000**2 / 2e12)
    assert masked == full / 2
    assert AttentionKernel(64, False, True, 1000, 2.0).published_s == pytest.approx(2.5 * full)


def test_kernels_alone_do_not_know_of_training() -> None:
    case = KernelPoint(tiny_cluster(), Product(512, 512, 512, 1.0))
    assert case.ratio(replace(DEVICE, sustained_fraction=0.5)) == case.ratio(DEVICE)


@pytest.mark.parametrize("kind", [Product, AttentionKernel])
@pytest.mark.parametrize("device", ["h100", "a100"])
def test_the_committed_constants_are_near_the_published_kernels(device: str, kind: type) -> None:
    composer = Composer()
    found = [KernelPoint.of(name, kernel, composer) for name, kernel in ANCHORS.kernels if name == device]
    cases = [case for case in found if isinstance(case.kernel, kind)]
    if not cases:
        assert (device, kind) == ("a100", AttentionKernel)
        return
    errors = np.array([case.ratio(case.cluster.device) - 1.0 for case in cases])
    assert np.median(np.abs(errors)) < 0.08
    # Without a dependence on size it is far off, so the test can fail.
    sizeless = {"gemm_half_flops": 0.0, "attention_half_tokens": 0.0, "attention_half_head_dim": 0.0}
    flat = replace(cases[0].cluster.device, **sizeless)
    assert np.median(np.abs([case.ratio(flat) - 1.0 for case in cases])) > np.median(np.abs(errors)) + 0.03


def test_an_iteration_is_simulated_and_slower_at_a_lower_clock() -> None:
    small = next(each for each in ANCHORS.iterations if each.group.name == "Nemotron-4 15B")
    case = IterationPoint.of(small, Composer())
    full, half = (
        case.ratio(replace(case.truth.cluster.device, sustained_fraction=fraction)) for fraction in (1.0, 0.5)
    )
    assert 0.5 < full < half < 2.5


@dataclass(frozen=True)
class Forward:
    """A forward whose milliseconds are 10 / ``sustained_fraction``, published as a range."""

    low: float
    high: float

    def inside(self, device: DeviceSpec) -> bool:
        return self.low <= 10 / device.sustained_fraction <= self.high


def test_the_interval_is_where_every_range_holds() -> None:
    cases: list[ForwardPoint] = [Forward(20, 40), Forward(25, 100)]  # type: ignore[list-item]
    assert interval(cases, DEVICE, "sustained_fraction", np.arange(1, 100) / 100) == (0.25, 0.4)
    none: list[ForwardPoint] = [*cases, Forward(1, 2)]  # type: ignore[list-item]
    assert np.isnan(interval(none, DEVICE, "sustained_fraction", np.arange(1, 100) / 100)).all()
