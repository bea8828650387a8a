"""Claims as their YAMLs state them: entries, published cells, settings, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.answers.documents.claim import (
    FREE,
    Claim,
    ClaimSetting,
    Measure,
    Situation,
    cited,
    fair_setting,
    load_claims,
    parse_claim,
    parse_claims,
)
from entrain_bench.answers.documents.definition import (
    check_keys,
    insert,
    overrides,
    read_definitions,
    words,
)
from entrain_bench.answers.documents.published import cell_fields, find_cells, our_names, published_cells
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import compose
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


def test_every_claim_is_complete_and_cites_its_paper() -> None:
    claims = load_claims()
    assert len(claims) > 500
    for claim in claims:
        published, *others = claim.settings.values()
        assert not [one for one in others if one.sweeps == published.sweeps], claim.name
    assert all(cited(claim.paper).startswith(("arXiv:", "GitHub ")) for claim in claims)
    assert all(len(one.words) > 30 for claim in claims for one in claim.settings.values())
    assert all(claim.cells for claim in claims), "of this repository every claim names its cells"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "h"}, "unit=h: must be one of x, %, GB, s, ms, stages"),
        ({"fair": {"measure": {"metric": "time"}}}, "measure.metric=time: unknown"),
        ({"fair": {"measure": {"by": "x"}}}, "measure key=by: unknown"),
        ({"unit": "GB"}, "to=True: must be fit for the unit"),
        ({"kind": "level", "value": None}, "kind=level: must be order without a number"),
        ({"verdict": "reproduced"}, "key=verdict: unknown"),
        ({"measure": {"metric": "mfu", "over": "median"}}, "measure.over=median: unknown"),
        ({"measure": {}}, "measure.metric: missing"),
        ({"against": {"common": []}}, "against: key=common: unknown"),
        ({"fair": {"choices": {}}}, "fair: key=choices: unknown"),
        (ALONE, "to=False: must be fit for the unit"),
        ({"cells": ["DIP-T5-memory-tim"]}, "cells=DIP-T5-memory-tim: unknown .did you mean DIP-T5-memory-time"),
        ({"assumption": {"text": "a"}}, "assumption: otherwise=missing"),
        ({"setting": "{bogus}"}, "field=bogus: unknown"),
    ],
)
def test_a_claim_that_says_something_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        claim_with(**change)


def test_number_unit_and_place_come_from_the_cells() -> None:
    claim = theirs()
    assert (claim.value, claim.unit, claim.where, claim.kind) == ((12.1,), "%", "Table A2, row 1", "gain")
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


# Keys of a cell's setting by the configuration key that states them.
SETTINGS = {
    "global_batch": "global_batch",
    "microbatch_size": "microbatch_size",
    "seq_len": "workload.sequence_tokens",
    "vision_share": "workload.vision_share",
    "encoder_stages": "strategy.planner.encoder_stages",
    "enc_tp": "strategy.planner.encoder_tp",
}


@cache
def gpus_of(cluster: str, nodes: str) -> int:
    values = compose(f"cluster={cluster or 'a40x64'}").cluster
    return int(values["gpus_per_node"]) * int(nodes or values["num_nodes"])


def contradictions(claim: Claim) -> Iterator[str]:
    """What of its cells a claim's published setting does not have: ``gpus``, ``model``, ``data``, or a key."""
    cells = (*claim.cells, *claim.per)
    sides = [{key: text.partition("=")[2] for key, text in overrides(one).items()} for one in claim.published.sweeps]
    allowed = [([*map(int, re.findall(r"\d+", cell.gpus))], " to " in cell.gpus) for cell in cells if cell.gpus]
    for number in {gpus_of(side.get("cluster", ""), side.get("cluster.num_nodes", "")) for side in sides}:
        fits = (given[0] <= number <= given[-1] if spans else number in given for given, spans in allowed)
        if allowed and not any(fits):
            yield "gpus"
    for key, group, ours in (("model", "models", "model"), ("data", "data", "workload")):
        theirs = {getattr(cell, key) for cell in cells} - {""}
        names = {name for text in theirs for name in our_names()[group].get(text, ())}
        chosen = {name for side in sides if ours in side for name in side[ours].split(",")}
        if not theirs <= our_names()[group].keys() or (theirs and not chosen <= names):
            yield key
    first = cells[0]
    plain = {key: str(value) for key, value in cell_fields(first).items() if key in first.setting}
    has_base = any(key.startswith("base_") for key in plain)
    for index, side in enumerate(sides if len(claim.published.situations) == 1 else ()):
        stated = {ours: plain[key] for key, ours in SETTINGS.items() if key in plain and index == 0}
        prefixes = ("base_llm_", "base_shared_") if index and has_base else ("", "llm_", "shared_")[: 3 - 2 * index]
        for degree in ("tp", "cp", "pp", "dp"):
            stated |= {f"layout.{degree}": plain[one + degree] for one in prefixes if one + degree in plain}
        for key, text in stated.items():
            ours = side.get(key, text)
            if ours not in (text, "null") and float(ours) != float(text):
                yield key


@pytest.mark.wide
def test_every_claim_has_the_setting_of_its_cells_but_for_what_it_names() -> None:
    for claim in load_claims():
        assert {*contradictions(claim)} == {*claim.differs}, claim.name


@pytest.mark.parametrize(
    ("common", "change", "what"),
    [
        ([], {}, []),
        (["cluster.num_nodes=10"], {}, ["gpus"]),
        (["model=vit3b_llm14b"], {}, ["model"]),
        (["workload.sequence_tokens=4096"], {}, ["workload.sequence_tokens"]),
        ([], {"to": ["strategy=megatron", "layout.tp=8"]}, ["layout.tp"]),
    ],
)
def test_a_contradiction_to_cells_is_seen(common: list[str], change: dict[str, Any], what: list[str]) -> None:
    assert [*contradictions(theirs(*common, **change))] == what


def test_cells_that_agree_up_to_the_last_part_are_a_claim_on_a_range() -> None:
    values = {key: value for key, value in THEIRS.items() if key not in ("cells", "to")}
    values |= {"ranges": "E-t2-b4-*", "measure": "encoder_gpus"}
    (claim,) = parse_claims("split", values | {"common": ["cluster=a40x16", "model=qwen25vl_llama3_3b"]})
    assert (claim.name, claim.group, claim.value) == ("split_t2_b4", "split", (7.0, 9.0))


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


@pytest.mark.wide
def test_every_fair_setting_of_a_claim_is_free() -> None:
    settings = [claim.settings["fair"] for claim in load_claims() if "fair" in claim.settings]
    assert len(settings) > 40
    for setting in settings:
        assert [*setting.common.values()][: len(FREE)] == [*FREE]
        assert not [text for text in setting.common.values() if text.startswith("layout.") and text not in FREE]
        strategies = [overrides(sweep)["strategy"].partition("=")[2] for sweep in setting.sweeps]
        assert len({*strategies}) == 1 or "megatron" in ",".join(strategies).split(","), strategies


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
    alone = ClaimSetting("", MEASURE, overrides("a=1"), (Situation(overrides("b=2")),))
    assert alone.changed({"of": overrides("a=3")}).pairs == [[("b=2", "a=3")]]
