"""Clusters with a profiled device: constants of the file, and links that come closest to what was measured."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.costs.links import all_gather_s, all_reduce_s, send_s
from entrain_bench.costs.profiled.profiled_cluster import cluster_with_times, fitted_link
from entrain_bench.costs.profiled.timed_points import CollectivePoint
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.cluster import ClusterSpec, LinkTier
from entrain_bench.specs.model import ModelSpec
from support.profiled import CONSTANTS, profile_of_formula, three, written

MODEL = ModelSpec.from_config(compose_cells(["model=tiny"])[0].config.model)


def cluster(path: Path, *overrides: str) -> ClusterSpec:
    override = written(path, profile_of_formula(MODEL, tokens=(1,)))
    given = ("model=tiny", "cluster=tiny", "cluster/device=profiled", override, *overrides)
    config = compose_cells(given)[0].config
    return cluster_with_times(config.cluster, MODEL, config.framework, config.speed)[0]


def test_constants_are_those_of_the_file(tmp_path: Path) -> None:
    found = cluster(tmp_path / "x.json")
    assert found.device.name == "made up"
    for name in ("peak_bf16_flops", "memory_bytes", "memory_bandwidth_bytes_per_s", "host_bandwidth_bytes_per_s"):
        assert getattr(found.device, name) == getattr(CONSTANTS, name)
    assert [tier.name for tier in found.tiers] == ["nvlink", "pcie", "network"]


def test_links_that_are_left_to_the_profile_are_those_it_measured(tmp_path: Path) -> None:
    found = cluster(tmp_path / "x.json", "cluster/node=profiled")
    (tier,) = found.tiers
    assert (tier.num_ranks, found.num_ranks) == (4, 4)
    assert tier.bandwidth_bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert tier.latency_s == pytest.approx(1e-5, rel=1e-3)


def test_what_was_timed_otherwise_is_refused(tmp_path: Path) -> None:
    for override, says in (
        ("freeze=[vision]", "not supported with cluster/device=profiled, because .* trainable layers. Set freeze="),
        ("recompute_granularity=selective", "must be full with cluster/device=profiled, because .* measured with it"),
    ):
        with pytest.raises(UserError, match=says):
            cluster(tmp_path / "x.json", override)


def test_a_fitted_link_gives_back_what_the_formulas_say() -> None:
    tier, sizes = LinkTier("x", 8, 3e9, 2e-5), np.array([1e3, 1e6])
    formulas = {
        "all_gather": lambda size: all_gather_s(size, 4, tier),
        "reduce_scatter": lambda size: all_gather_s(size, 4, tier),
        "all_reduce": lambda size: all_reduce_s(size, 4, tier),
        "send": lambda size: send_s(size, 1, tier),
    }
    points = tuple(
        CollectivePoint(name, 4, int(size), three(float(formula(size))), 9)
        for name, formula in formulas.items()
        for size in sizes
    )
    link = fitted_link(points, "x")
    assert link == pytest.approx({"bandwidth_bytes_per_s": 3e9, "latency_s": 2e-5}, rel=1e-3)


def test_links_that_were_not_measured_are_named(tmp_path: Path) -> None:
    profile = replace(profile_of_formula(MODEL, tokens=(1,)), collectives=())
    override = written(tmp_path / "x.json", profile)
    given = ("model=tiny", "cluster=tiny", "cluster/device=profiled", "cluster/node=profiled", override)
    with pytest.raises(UserError, match=r"tiers.profiled: communication was not measured. Run .* profile ranks="):
        prepare(compose_cells(given)[0].config)


def test_links_of_the_profile_do_not_join_machines(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ordered from the smallest block to all 8 ranks"):
        cluster(tmp_path / "x.json", "cluster/node=profiled", "cluster.num_nodes=2")
