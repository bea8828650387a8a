"""Clusters: every YAML and its sources, what links carry, and errors."""

import csv
from dataclasses import fields

import numpy as np
import pytest
import yaml

from entrain_bench.base.errors import UserError
from entrain_bench.config.tree import config_tree
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.cluster import OF_DEVICE, PEAKS, ClusterSpec, Speed
from support.builders import tiny_cluster
from support.specs import changed, cluster, load

TREE = config_tree() / "cluster"
CLUSTERS = sorted(path.stem for path in TREE.glob("*.yaml"))
OBTAINED = {"cited", "derived", "measured", "carried over", "fitted"}


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_composes_and_parses(name: str) -> None:
    spec = cluster(name)
    assert spec.name == name
    assert spec.tiers[-1].num_ranks == spec.num_ranks
    bandwidths = [tier.bandwidth_bytes_per_s for tier in spec.tiers]
    assert bandwidths == sorted(bandwidths, reverse=True)
    if name != "tiny":
        assert name.endswith(f"x{spec.num_ranks}")


@pytest.mark.wide
@pytest.mark.parametrize("name", CLUSTERS)
def test_every_constant_has_a_source(name: str) -> None:
    spec = cluster(name)
    with (TREE / "sources.csv").open(newline="") as rows:
        sources = {(row["part"], row["constant"]): row for row in csv.DictReader(rows)}
    for row in sources.values():
        assert row["unit"]
        assert row["source"] or row["obtained"] == "carried over"
        assert row["read"].startswith("2026-")
        assert row["obtained"] in OBTAINED
    defaults = yaml.safe_load((TREE / f"{name}.yaml").read_text())["defaults"]
    parts = {spec.device.name, name, *(f"node/{choice['node']}" for choice in defaults if "node" in choice)}
    owners = {"": spec.device} | {f"{tier.name}.": tier for tier in spec.tiers}
    constants = [
        f"{where}{field.name}"
        for where, owner in owners.items()
        for field in fields(owner)
        # An effect that is off has no source.
        if not isinstance(value := getattr(owner, field.name), str)
        and field.name != "num_ranks"
        and value != field.default
    ]
    assert {*constants} == {constant for part, constant in sources if part in parts}
    # The kernels that efficiencies are of are named in their sources.
    if spec.device.name != "cpu":
        for way in ("forward", "backward"):
            kernel = f"FlashAttention-{spec.device.attention_kernel[-1]}"
            assert kernel in sources[spec.device.name, f"attention_{way}_efficiency"]["source"]


@pytest.mark.parametrize(
    ("ranks", "bandwidth", "latency_s"),
    [
        # Tiers of 2, 8 and 16 ranks at 1e9, 5e8 and 1e8 bytes/s.
        ([0, 1], 1e9, 1e-6),
        ([0, 2], 5e8, 2e-6),  # one of each pair
        ([0, 1, 2, 3], 1e9, 2e-6),  # both of each pair: 2 x 5e8
        ([0, 8], 1e8, 1e-5),  # one of each node
        ([0, 2, 8, 10], 2e8, 1e-5),  # two of each node, one of each pair
        ([*range(16)], 8e8, 1e-5),  # all: 8 x 1e8 between nodes, 2 x 5e8 between pairs
        ([0, 1, 2, 8], 1e8, 1e-5),  # the node with fewest ranks decides
        ([5], 1e9, 1e-6),
    ],
)
def test_a_ring_leaves_a_block_through_the_links_of_all_its_ranks(
    ranks: list[int], bandwidth: float, latency_s: float
) -> None:
    (tier,) = tiny_cluster(2, 8).ring_tiers(np.array([ranks]))
    assert (tier.bandwidth_bytes_per_s, tier.latency_s) == (bandwidth, latency_s)


def test_a_faster_or_slower_cluster_attains_more_or_less() -> None:
    spec = cluster("a40x64")
    assert spec.at(Speed()) == spec
    faster = spec.at(Speed(gemm=0.5, attention=0.7, node=3.0, network=2.0, launch=4.0))
    bandwidths = [tier.bandwidth_bytes_per_s for tier in faster.tiers]
    assert bandwidths == [
        tier.bandwidth_bytes_per_s * factor for tier, factor in zip(spec.tiers, (3, 3, 2), strict=True)
    ]
    assert faster.device.kernel_launch_s == 4 * spec.device.kernel_launch_s
    assert [tier.latency_s for tier in faster.tiers] == [tier.latency_s for tier in spec.tiers]
    (cell,) = compose_cells(["speed.network=0.5"])
    setting = prepare(cell.config)
    assert setting.truth.cluster == setting.job.cluster == spec.at(Speed(network=0.5))


@pytest.mark.parametrize("name", ["a40x64", "h100x64"])
@pytest.mark.parametrize("speed", [Speed(gemm=2), Speed(attention=1.5, memory=3), Speed(gemm=1.25, attention=9)])
def test_beyond_its_peak_a_device_has_a_higher_one(name: str, speed: Speed) -> None:
    before = cluster(name).device
    after = cluster(name).at(speed).device
    for peak, shares in PEAKS.items():
        wanted = {}
        for factor, names in OF_DEVICE.items():
            wanted |= {share: getattr(speed, factor) * getattr(before, share) for share in names if share in shares}
        for share, attained in wanted.items():
            rate = getattr(after, peak) * getattr(after, share)
            assert rate == pytest.approx(getattr(before, peak) * attained, rel=1e-14)
            assert getattr(after, share) <= 1
        assert getattr(after, peak) == getattr(before, peak) * max(1.0, *wanted.values())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("colour", "red", "cluster key=colour: unknown"),
        ("device/peak_bf16_flop", 1.0, "did you mean peak_bf16_flops"),
        ("device/peak_bf16_flops", -1.0, "cluster.device.peak_bf16_flops=-1.0: must be positive"),
        ("device/sustained_fraction", 1.5, "cluster.device.sustained_fraction=1.5: must be in (0, 1]"),
        ("tiers/0/latency_s", 0.0, "cluster.tiers[0].latency_s=0.0: must be positive"),
        ("tiers/0/num_ranks", 8, "cluster.tiers=[8, 4, 4]: must be ordered"),
        ("tiers/2/num_ranks", 8, "cluster.tiers=[2, 4, 8]: must be ordered from the smallest block to all 4 ranks"),
    ],
)
def test_bad_clusters_are_named(path: str, value: object, message: str) -> None:
    with pytest.raises(UserError) as error:
        ClusterSpec.from_config(changed(load("cluster", "tiny"), path, value))
    assert message in str(error.value)
