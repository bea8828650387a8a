"""Claims as their YAMLs state them: entries, published cells, settings, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.answers.documents import published
from entrain_bench.answers.documents.claim import (
    Claim,
    cited,
    device_memory_bytes,
    load_claims,
    mismatches,
    num_gpus,
    parse_claim,
    parse_claims,
)
from entrain_bench.answers.documents.definition import check_keys, insert, overrides, read_definitions, words
from entrain_bench.answers.documents.published import cell_fields, find_cells, our_names, published_cells
from entrain_bench.answers.documents.sides import FREE, ClaimSetting, Measure, Situation, fair_setting
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import choices
from support.claims import ALONE, claim_with

THEIRS: dict[str, Any] = {
    "claim": "One gains",
    "paper": "2605.27678",
    "cells": ["H-a2-01"],
    "measure": "tflops_per_gpu",
    "setting": "as theirs",
    "common": ["model=vit1b_llm14b", "cluster=h100x64", "cluster.num_nodes=9", "workload.sequence_tokens=8192"],
    "of": ["strategy=hetero_colocated", "layout.tp=2"],
    "to": ["strategy=megatron", "layout.tp=4"],
}


def theirs(*common: str, **changes: Any) -> Claim:
    return parse_claim("some", THEIRS | {"common": [THEIRS["common"], *common]} | changes)


def load(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "mine.yaml").write_text(text)

    def parse(name: str, values: Any) -> list[tuple[str, Any]]:
        check_keys(values, ["text", "value"], ["text"])
        return [(name, values)]

    return dict(read_definitions(tmp_path / "mine.yaml", "things", parse))


def test_an_entry_has_the_defaults_that_it_does_not_state(tmp_path: Path) -> None:
    content = """
defaults: {value: 1}
shared: [&hello hello you]
things:
  one: &one {text: *hello}
  two: {<<: *one, value: 2}
"""
    one, two = {"text": "hello you", "value": 1}, {"text": "hello you", "value": 2}
    assert load(tmp_path, content) == {"one": one, "two": two}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thing: {}", "mine.yaml: key=thing: unknown .did you mean things"),
        ("shared: {}", "mine.yaml: things=missing: must be stated"),
        ("things: {one: {txet: a}}", r"mine.yaml: one: key=txet: unknown \(did you mean text\?\)"),
        ("things: {one: {value: a}}", "mine.yaml: one: text=missing: must be stated"),
        ("things: {one: *none}", "mine.yaml: .*undefined alias"),
        ("things: [", "mine.yaml: .*expected the node content"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_lists_are_flat_later_overrides_replace_earlier_ones_and_fields_are_inserted() -> None:
    given = overrides([["model=m", ["seed=0", "a=1"]], "seed=1", "+z=1"])
    assert [*given.values()] == ["model=m", "seed=1", "a=1", "+z=1"]
    value = {"{who}": [["one\n two", "{who},"], "{kind: of, text}"]}
    shown = {key: words(text) for key, text in insert(value, {"who": "you"}).items()}
    assert shown == {"you": "one two you, {kind: of, text}"}
    with pytest.raises(UserError, match=r"field=whom: unknown .did you mean who"):
        insert(["{whom}"], {"who": 1})


def test_every_paper_is_there_and_its_numbers_are_numbers() -> None:
    cells = published_cells()
    assert len({cell.source for cell in cells.values()}) == 14
    assert len(cells) > 2000
    assert Counter(cell.source for cell in cells.values())["heterogeneous"] > 500
    named = [cell for cell in cells.values() if cell.value is None and cell.printed]
    assert all(cell.kind == "setting" for cell in named), "only settings are words"
    assert cells["DIP-T5-memory-time"].value == 16.05
    assert cells["H-a2-07"].value is None, "the paper prints a word"


def test_our_names_are_choices_that_exist() -> None:
    known = {"models": choices("model"), "data": choices("workload")}
    for group, names in our_names().items():
        assert {name for ours in names.values() for name in ours} <= {*known[group]}
        printed = {getattr(cell, {"models": "model"}.get(group, group)) for cell in published_cells().values()}
        assert names.keys() <= printed, "the papers write these names"


def test_a_pattern_stands_for_cells_with_a_number() -> None:
    names = [cell.id for cell in find_cells(["H-a2-0[67]", "H-a2-07", "H-a2-1?-step-c"])]
    assert names[:2] == ["H-a2-06", "H-a2-07"], "a word is found by its id alone"
    assert len(names) == 12
    with pytest.raises(UserError, match=r"cells=H-a9-\*: unknown"):
        find_cells(["H-a9-*"])


def test_fields_of_a_cell_are_plain_numbers_and_our_names() -> None:
    fields = cell_fields(published_cells()["H-a4-01-tflops"])
    assert (fields["model"], fields["seq_len"], fields["seq_len_text"]) == ("vit6b_llm120b", 8192, "8K")
    assert (fields["base_gpus"], fields["gpus"], fields["nodes"]) == (256, 264, 33)
    assert (fields["enc_recompute"], fields["llm_recompute"], fields["vision_share"]) == ("vision", "", 0.5)
    assert cell_fields(published_cells()["E-t1-synth-1b-entrain-encoder"])["workload"] == "synthchartnet_like"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "H-a2-01"}, r"theirs.csv:2: id=H-a2-01: must be stated once"),
        ({"kind": "speed"}, r"theirs.csv:2: kind=speed: must be one of time"),
        ({"id": "X-1,Table 2,,,,,,,,time,1,s,time,R,,,\nX-1"}, r"theirs.csv:3: id=X-1: must be stated once"),
    ],
)
def test_a_cell_that_cannot_be_is_named(change: dict[str, str], message: str, tmp_path: Path) -> None:
    heading = "id,where,system,baseline,model,data,gpus,gpu_type,setting,metric,value,unit,kind,how,low,high,note\n"
    row = "{id},Table 1,C,H,1B+7B,,256/264,H100-80GB,tp=8;seq_len=8K,gain,{value},%,{kind},R,,,\n"
    (tmp_path / published.FOLDER).mkdir()
    values = {"id": "X-1", "value": "1.5", "kind": "ratio"} | change
    (tmp_path / published.FOLDER / "theirs.csv").write_text(heading + row.format(**values))
    with pytest.raises(UserError, match=message):
        published_cells(str(tmp_path))


def test_every_claim_is_complete_and_cites_its_paper() -> None:
    claims = load_claims()
    assert len(claims) > 500
    assert all(cited(claim.paper).startswith(("arXiv:", "GitHub ")) for claim in claims)
    assert all(len(one.words) > 30 for claim in claims for one in (claim.published, claim.fair) if one)
    assert all(claim.cells for claim in claims), "of this repository every claim names its cells"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "h"}, "unit=h: must be one of x, %, GB, s, ms, stages"),
        ({"fair": {"measure": {"metric": "time"}}}, "measure.metric=time: unknown"),
        ({"fair": {"measure": {"by": "x"}}}, "measure key=by: unknown"),
        ({"unit": "GB"}, "to=given: must be empty for GB"),
        ({"kind": "eye"}, "kind=eye: must be one of gain, order, level, limit"),
        ({"kind": "level", "value": None}, "kind=level: must be order without a number"),
        ({"kind": "order"}, "kind=order: must be order without a number, and only then"),
        ({"value": 1.0}, r"value=\[1.0\]: must be a gain"),
        ({"value": None, "unit": "%"}, "unit=%: must be x for an order"),
        ({"verdict": "reproduced"}, "key=verdict: unknown"),
        ({"measure": {"metric": "mfu", "over": "median"}}, "measure.over=median: unknown"),
        ({"measure": {}}, "measure.metric: missing"),
        ({"at": ["seed=1"]}, "against=None: must be given with at"),
        ({"against": {"common": []}}, "against: key=common: unknown"),
        ({"fair": {"choices": {}}}, "fair: key=choices: unknown"),
        (ALONE, "to=.*: must be given for a ratio"),
        ({"of": []}, "of=.*: must be the overrides of the runs in the numerator"),
        ({"fair": {"common": ["layout.tp=2"]}}, "fair.common=layout.tp=2: must be of the job"),
        ({"cells": ["DIP-T5-memory-tim"]}, "cells=DIP-T5-memory-tim: unknown .did you mean DIP-T5-memory-time"),
        ({"choices": {"none": {}}}, "none={}: must be overrides that make"),
        ({"assumption": {"text": "a"}}, "assumption: otherwise=missing"),
        ({"setting": "{gpus}"}, "field=gpus: unknown"),
    ],
)
def test_a_claim_that_says_something_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        claim_with(**change)


def test_number_unit_and_place_come_from_the_cells() -> None:
    claim = theirs()
    assert (claim.value, claim.unit, claim.where, claim.kind) == ((12.1,), "%", "Table A2, row 1", "gain")
    assert mismatches(claim) == []
    assert claim.paper_setting.startswith("12.1 % (C), 1B+14B, 72 H100-80GB GPUs, seq len 8K")
    ratio = theirs(cells=["DIP-T5-megatron-time"], per=["DIP-T5-partitioner-time"])
    assert (ratio.value, ratio.unit) == ((26.13 / 22.27,), "x")
    pairs = theirs(
        cells=["E-t3-vision-chartqa-dip", "E-t3-vision-cocoqa-dip"],
        per=["E-t3-vision-chartqa-disttrain", "E-t3-vision-cocoqa-disttrain"],
    )
    assert [f"{value:.2f}" for value in pairs.value] == ["1.20", "1.26"]
    assert theirs(cells=["DF-F13-megatron", "DF-F13-pytorch"]).value == (-84.0, -82.0), "less is a negative change"
    axis = theirs(cells=["E-f13c-axis"], kind="limit", to=[])
    assert (axis.value, axis.unit) == ((16.0,), "GB"), "the next tick"
    share = theirs(cells=["DIP-T1-lm-mfu"], to=[])
    assert (share.value, share.unit, share.kind) == ((40.0,), "%", "level")
    assert theirs(cells=["DT-mfu-gain-72b"]).where == "Section 7 (by notes)"
    assert theirs(cells=["DT-reorder-min"]).where == "not traced (notes of others)"


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
        [*parse_claims("some", THEIRS | {"common": [THEIRS["common"], common]} | change)]


@pytest.mark.parametrize("stated", [{"value": 12.1}, {"unit": "%"}, {"where": "Table A2"}])
def test_what_the_cells_state_is_not_stated_again(stated: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must be left out; the cells state it"):
        theirs(**stated)


def test_cells_that_agree_up_to_the_last_part_are_a_claim_on_a_range() -> None:
    values = {key: value for key, value in THEIRS.items() if key not in ("cells", "to")}
    values |= {"ranges": "E-t2-b4-*", "measure": "encoder_gpus"}
    (claim,) = parse_claims("split", values | {"common": ["cluster=a40x16", "model=qwen25vl_llama3_3b"]})
    assert (claim.name, claim.group, claim.value) == ("split_t2_b4", "split", (7.0, 9.0))


def test_clusters_have_their_gpus_and_the_published_memory() -> None:
    assert mismatches(theirs("cluster=mine")) == [], "a cluster of the user's is not known here"
    with pytest.raises(UserError, match="cluster=mine: unknown"):
        num_gpus(["cluster=mine"])
    changed = ["cluster=h100x64", "cluster.num_nodes=33", "cluster.device.memory_bytes=1099511627776"]
    assert (num_gpus(changed), num_gpus(["cluster=h100x64"])) == (264, 64)
    assert device_memory_bytes(changed) == device_memory_bytes(["cluster=h100x64"]) < 1e11


@pytest.mark.wide
def test_claims_compose_to_the_clusters_that_their_cells_were_compared_with() -> None:
    composer = Composer(None)
    sweeps = dict.fromkeys(sweep for claim in load_claims() for sweep in claim.sweeps)
    assert len(sweeps) > 500
    # Composing takes half a second where nothing is cached.
    for sweep in [*sweeps][::40]:
        first, *_ = composer.sweep(sweep).cells
        cluster = composer.run(first).cluster
        assert cluster["num_nodes"] * cluster["gpus_per_node"] == num_gpus(sweep)


MEASURE = Measure("iteration_time_s")
PUBLISHED = ClaimSetting(
    "as theirs",
    MEASURE,
    overrides(
        ["tuning=own", "model=m", "workload=w", "layout.tp=4", "microbatch_size=1", "cluster.device.memory_bytes=1"]
    ),
    (
        Situation(
            of=overrides(["strategy=ours", "strategy.planner.encoder_tp=2", "cluster.num_nodes=33"]),
            to=overrides(["strategy=megatron_rigid", "layout.pp=8", "encoder_sp=false", "cluster.num_nodes=32"]),
        ),
    ),
)


def fair(**stated: list[str]) -> ClaimSetting:
    return fair_setting(PUBLISHED, {side: overrides(texts) for side, texts in stated.items()}, MEASURE, "Less of it.")


def test_the_job_stays_and_everything_else_is_free() -> None:
    setting = fair(to=["strategy=megatron"], common=["global_batch=512"])
    common = (*FREE, "model=m", "workload=w", "global_batch=512")
    of, to = (*common, "strategy=ours", "cluster.num_nodes=33"), (*common, "strategy=megatron", "cluster.num_nodes=32")
    assert setting.pairs == [[of, to]]
    assert setting.words.startswith("Less of it. One rule for all claims")


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({}, r"fair.to=.*: must be given, with strategy=megatron"),
        ({"to": ["strategy=megatron", "layout.tp=8"]}, "fair=layout.tp=8: must be a strategy, a part"),
        ({"to": ["strategy=megatron", "microbatch_size=4"]}, "fair=microbatch_size=4: must be"),
        ({"to": ["strategy=megatron", "strategy.planner.split=uniform"]}, "fair=strategy.planner.split=uniform"),
        ({"to": ["strategy=megatron", "encoder_sp=false"]}, "fair=encoder_sp=false"),
        ({"to": ["strategy=megatron"], "common": ["layout.recompute=[]"]}, "fair.common=layout.recompute"),
        ({"to": ["strategy=megatron"], "common": ["strategy.planner.num_trials=8"]}, "fair.common=strategy.planner"),
    ],
)
def test_a_fair_setting_that_differs_is_refused(stated: dict[str, list[str]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fair(**stated)


def test_every_fair_setting_of_a_claim_is_free() -> None:
    settings = [claim.fair for claim in load_claims() if claim.fair]
    assert len(settings) > 40
    for setting in settings:
        assert [*setting.common.values()][: len(FREE)] == [*FREE]
        assert not [text for text in setting.common.values() if text.startswith("layout.") and text not in FREE]
    assert sum(any("megatron" in text for text in " ".join(one.sweeps[-1]).split("=")) for one in settings) > 30


def test_a_change_takes_the_place_of_overrides_of_the_same_key() -> None:
    of, to = overrides(["s=x", "c=3"]), overrides("s=y")
    two = tuple(Situation(of, to, overrides(f"d={number}")) for number in (1, 2))
    setting = ClaimSetting("", MEASURE, overrides(["a=1", "b=2"]), two)
    changed = setting.changed({"common": overrides(["a=5", "c=6", "e=7"])})
    common = ("b=2", "a=5", "c=6", "e=7")
    assert changed.pairs[1] == [(*common, "d=2", "s=x"), (*common, "d=2", "s=y")]
    # If one side changes an override of all runs, the other side keeps it.
    changed = setting.changed({"to": overrides(["b=9", "s=z"])})
    assert changed.pairs[0] == [("a=1", "d=1", "b=2", "s=x", "c=3"), ("a=1", "d=1", "b=9", "s=z")]
    with pytest.raises(UserError, match="change=d: must be a key other than those of at and against"):
        setting.changed({"common": overrides("d=8")})
    alone = ClaimSetting("", MEASURE, overrides("a=1"), (Situation(overrides("b=2")),))
    assert alone.changed({"of": overrides("a=3")}).pairs == [[("b=2", "a=3")]]
