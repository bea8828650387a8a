"""Claims against the published cells that they name: what differs is refused."""

from __future__ import annotations

from typing import Any

import pytest

from entrain_bench.answers.documents.agreement import device_memory_bytes, mismatches, num_gpus
from entrain_bench.answers.documents.claim import Claim, load_claims, parse_claim, parse_claims
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer

VALUES: dict[str, Any] = {
    "claim": "One gains",
    "paper": "2605.27678",
    "cells": ["H-a2-01"],
    "measure": "tflops_per_gpu",
    "setting": "as theirs",
    "common": ["model=vit1b_llm14b", "cluster=h100x64", "cluster.num_nodes=9", "workload.sequence_tokens=8192"],
    "of": ["strategy=hetero_colocated", "layout.tp=2"],
    "to": ["strategy=megatron", "layout.tp=4"],
}
ALONE: dict[str, Any] = {"to": []}


def claim(*common: str, **changes: Any) -> Claim:
    return parse_claim("some", VALUES | {"common": [VALUES["common"], *common]} | changes)


def wrong(claim: Claim) -> list[str]:
    return mismatches(claim.cells, claim.per, claim.published, claim.differs)


def test_number_unit_and_place_come_from_the_cells() -> None:
    found = claim()
    assert (found.value, found.unit, found.where, found.kind) == ((12.1,), "%", "Table A2, row 1", "gain")
    assert wrong(found) == []
    assert found.paper_setting.startswith("12.1 % (C), 1B+14B, 72 H100-80GB GPUs, seq len 8K")
    ratio = claim(cells=["DIP-T5-megatron-time"], per=["DIP-T5-partitioner-time"])
    assert (ratio.value, ratio.unit) == ((26.13 / 22.27,), "x")
    pairs = claim(
        cells=["E-t3-vision-chartqa-dip", "E-t3-vision-cocoqa-dip"],
        per=["E-t3-vision-chartqa-disttrain", "E-t3-vision-cocoqa-disttrain"],
    )
    assert [f"{value:.2f}" for value in pairs.value] == ["1.20", "1.26"]
    assert claim(cells=["DF-F13-megatron", "DF-F13-pytorch"]).value == (-84.0, -82.0), "less is a negative change"
    axis = claim(cells=["E-f13c-axis"], kind="limit", **ALONE)
    assert (axis.value, axis.unit) == ((16.0,), "GB"), "the next tick"
    share = claim(cells=["DIP-T1-lm-mfu"], **ALONE)
    assert (share.value, share.unit, share.kind) == ((40.0,), "%", "level")
    assert claim(cells=["DT-mfu-gain-72b"]).where == "Section 7 (by notes)"
    assert claim(cells=["DT-reorder-min"]).where == "not traced (notes of others)"


@pytest.mark.parametrize(
    ("common", "change", "message"),
    [
        (["cluster.num_nodes=10"], {}, "cluster: 80 GPUs, the cells say 72"),
        (["model=vit3b_llm14b"], {}, r"model=vit3b_llm14b: the cells say 1B\+14B"),
        (["workload.sequence_tokens=4096"], {}, "workload.sequence_tokens=4096: H-a2-01 states 8192"),
        ([], {"differs": {"gpus": "fewer"}}, "differs.gpus: the setting has what the cells state"),
        ([], {"to": ["strategy=megatron", "layout.tp=8"]}, "layout.tp=8: H-a2-01 states 4"),
    ],
)
def test_a_claim_that_contradicts_its_cells_is_refused(common: list[str], change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}$"):
        [*parse_claims("some", VALUES | {"common": [VALUES["common"], common]} | change)]


@pytest.mark.parametrize("stated", [{"value": 12.1}, {"unit": "%"}, {"where": "Table A2"}])
def test_what_the_cells_state_is_not_stated_again(stated: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must be left out; the cells state it"):
        claim(**stated)


def test_cells_that_agree_up_to_the_last_part_are_a_claim_on_a_range() -> None:
    values = {key: value for key, value in VALUES.items() if key not in ("cells", "to")}
    values |= {"ranges": "E-t2-b4-*", "measure": "encoder_gpus", "common": ["cluster=a40x16"], "differs": {}}
    (claim,) = parse_claims("split", values | {"common": ["cluster=a40x16", "model=qwen25vl_llama3_3b"]})
    assert (claim.name, claim.group, claim.value) == ("split_t2_b4", "split", (7.0, 9.0))


def test_a_cluster_of_the_users_is_not_known_here() -> None:
    assert wrong(claim("cluster=mine")) == []
    with pytest.raises(UserError, match="cluster=mine: unknown"):
        num_gpus(["cluster=mine"])


def test_a_changed_cluster_has_its_gpus_and_the_published_memory() -> None:
    changed = ["cluster=h100x64", "cluster.num_nodes=33", "cluster.device.memory_bytes=1099511627776"]
    assert (num_gpus(changed), num_gpus(["cluster=h100x64"])) == (264, 64)
    assert device_memory_bytes(changed) == device_memory_bytes(["cluster=h100x64"]) < 1e11


@pytest.mark.wide
def test_claims_compose_to_the_clusters_that_their_cells_were_compared_with() -> None:
    composer = Composer(None)
    sweeps = dict.fromkeys(sweep for each in load_claims() for sweep in each.sweeps)
    assert len(sweeps) > 500
    # Composing takes half a second where nothing is cached.
    for sweep in [*sweeps][::40]:
        first, *_ = composer.sweep(sweep).cells
        cluster = composer.run(first).cluster
        assert cluster["num_nodes"] * cluster["gpus_per_node"] == num_gpus(sweep)
