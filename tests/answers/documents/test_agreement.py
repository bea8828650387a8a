"""Claims against the published cells that they name: what differs is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrain_bench.answers.documents.agreement import cluster_facts, mismatches
from entrain_bench.answers.documents.claim import Claim, parse_claim
from entrain_bench.answers.documents.claims import load_claims
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import choices

PUBLISHED = {
    "setting": "as theirs",
    "common": ["model=vit1b_llm14b", "cluster=h100x64", "cluster.num_nodes=9", "workload.sequence_tokens=8192"],
    "of": ["strategy=hetero_colocated", "layout.tp=2"],
    "to": ["strategy=megatron", "layout.tp=4"],
}
VALUES: dict[str, Any] = {
    "claim": "One gains",
    "paper": "2605.27678",
    "cells": ["H-a2-01"],
    "measure": "tflops_per_gpu",
    "published": PUBLISHED,
}


def claim(common: list[str] | None = None, **changes: Any) -> Claim:
    own = {"common": [*PUBLISHED["common"], *common]} if common else {}
    return parse_claim("some", VALUES | {"published": PUBLISHED | own} | changes)


def test_number_unit_and_place_come_from_the_cells() -> None:
    found = claim()
    assert (found.value, found.unit, found.where, found.judged_by) == ((12.1,), "%", "Table A2, row 1", "gain")
    assert mismatches(found) == []
    assert found.paper_setting.startswith("12.1 % (C), 1B+14B, 72 H100-80GB GPUs, seq len 8K")
    ratio = claim(cells=["DIP-T5-megatron-time"], per=["DIP-T5-partitioner-time"])
    assert (ratio.value, ratio.unit) == ((26.13 / 22.27,), "x")
    pairs = claim(
        cells=["E-t3-vision-chartqa-dip", "E-t3-vision-cocoqa-dip"],
        per=["E-t3-vision-chartqa-disttrain", "E-t3-vision-cocoqa-disttrain"],
    )
    assert [f"{value:.2f}" for value in pairs.value] == ["1.20", "1.26"]
    assert claim(cells=["DF-F13-megatron", "DF-F13-pytorch"]).value == (-84.0, -82.0), "less is a negative change"
    alone = {key: PUBLISHED[key] for key in ("setting", "common", "of")}
    axis = claim(cells=["E-f13c-axis"], judged_by="limit", published=alone)
    assert (axis.value, axis.unit) == ((16.0,), "GB"), "the next tick"
    share = claim(cells=["DIP-T1-lm-mfu"], published=alone)
    assert (share.value, share.unit, share.judged_by) == ((40.0,), "%", "level")
    assert claim(cells=["DT-mfu-gain-72b"]).where == "Section 7 (by notes)"
    assert claim(cells=["DT-reorder-min"]).where == "not traced (notes of others)"


@pytest.mark.parametrize(
    ("common", "change", "message"),
    [
        (["cluster.num_nodes=10"], {}, "cluster: 80 GPUs, the cells say 72"),
        (["model=vit3b_llm14b"], {}, r"model=vit3b_llm14b: the cells say 1B\+14B"),
        (["workload.sequence_tokens=4096"], {}, "workload.sequence_tokens=4096: H-a2-01 states 8192"),
        ([], {"value": 12.2, "unit": "%"}, r"value=\[12.2\] %: the cells say \[12.1\] %"),
        ([], {"where": "Table A3"}, "where=Table A3: H-a2-01 is in Table A2, row 1"),
        ([], {"paper_setting": "Degrees: not known here."}, "'Degrees: not known here.': H-a2-01 states llm tp"),
        ([], {"paper_setting": "The global batch is not stated."}, "H-a2-01 states global batch"),
        ([], {"differs": {"gpus": "fewer"}}, "differs.gpus: the setting has what the cells state"),
        ([], {"published": PUBLISHED | {"to": ["strategy=megatron", "layout.tp=8"]}}, "layout.tp=8: H-a2-01 states 4"),
    ],
)
def test_a_claim_that_says_otherwise_than_its_cells_is_refused(
    common: list[str], change: dict[str, Any], message: str
) -> None:
    (found,) = mismatches(claim(common, **change))
    with pytest.raises(UserError, match=message):
        raise UserError(found)


def test_what_cannot_be_as_published_is_said() -> None:
    fewer = claim(["cluster.num_nodes=8"], differs={"gpus": "64 GPUs, for lack of a node"})
    assert mismatches(fewer) == []


def test_claims_without_cells_have_nothing_to_differ_from() -> None:
    assert mismatches(replace(claim(), cells=())) == []


def test_a_cluster_of_the_users_is_not_known_here() -> None:
    assert mismatches(claim(["cluster=mine"])) == []
    with pytest.raises(UserError, match="cluster=mine: unknown"):
        cluster_facts(["cluster=mine"])


def test_facts_of_a_cluster_are_those_of_its_composed_configuration() -> None:
    composer = Composer(None)
    for name in choices("cluster"):
        config = composer.run([f"cluster={name}"]).cluster
        facts = cluster_facts([f"cluster={name}"])
        assert facts.num_gpus == config["num_nodes"] * config["gpus_per_node"]
        assert facts.memory_bytes == config["device"]["memory_bytes"]
    changed = ["cluster=h100x64", "cluster.num_nodes=33", "cluster.device.memory_bytes=1099511627776"]
    assert cluster_facts(changed).num_gpus == 264
    assert cluster_facts(changed) == replace(cluster_facts(["cluster=h100x64"]), num_gpus=264), "the published device"


@pytest.mark.wide
def test_claims_compose_to_the_clusters_that_their_cells_were_compared_with() -> None:
    composer = Composer(None)
    sweeps = dict.fromkeys(sweep for each in load_claims() for side in each.settings for sweep in side.sweeps)
    assert len(sweeps) > 500
    # Composing takes half a second where nothing is cached.
    for sweep in [*sweeps][::40]:
        first, *_ = composer.sweep(sweep).cells
        cluster = composer.run(first).cluster
        assert cluster["num_nodes"] * cluster["gpus_per_node"] == cluster_facts(sweep).num_gpus
