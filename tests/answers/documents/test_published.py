"""Published numbers: every cell is read, patterns find cells, and claims get their fields."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from entrain_bench.answers.documents import published
from entrain_bench.answers.documents.published import cell_fields, find_cells, our_names, published_cells
from entrain_bench.base.errors import UserError
from entrain_bench.config.tree import choices

HEADING = (
    "id,where,system,baseline,model,data,gpus,gpu_type,setting,metric,value,unit,kind,how,low,high,note\n"
    "{id},Table 1,C,H,1B+7B,,256/264,H100-80GB,tp=8;seq_len=8K,gain,{value},%,{kind},R,,,\n"
)


def test_every_paper_is_there_and_its_numbers_are_numbers() -> None:
    cells = published_cells()
    papers = Counter(cell.source for cell in cells.values())
    assert len(papers) == 14
    assert len(cells) > 2000
    assert papers["heterogeneous"] > 500
    words = [cell.id for cell in cells.values() if cell.value is None and cell.printed]
    assert all(cells[name].kind == "setting" for name in words), "only settings are words"
    assert cells["DIP-T5-memory-time"].value == 16.05
    assert cells["H-a2-07"].value is None, "the paper prints a word"


def test_our_names_are_choices_that_exist() -> None:
    known = {"models": choices("model"), "data": choices("workload")}
    for group, names in our_names().items():
        assert {name for ours in names.values() for name in ours} <= {*known[group]}
        theirs = {getattr(cell, {"models": "model"}.get(group, group)) for cell in published_cells().values()}
        assert names.keys() <= theirs, "the papers write these names"


def test_a_pattern_stands_for_cells_with_a_number() -> None:
    found = [cell.id for cell in find_cells(["H-a2-0[67]", "H-a2-07", "H-a2-1?-step-c"])]
    assert found[:2] == ["H-a2-06", "H-a2-07"], "a word is found by its id alone"
    assert len(found) == 12
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
    values = {"id": "X-1", "value": "1.5", "kind": "ratio"}
    (tmp_path / published.FOLDER).mkdir()
    (tmp_path / published.FOLDER / "theirs.csv").write_text(HEADING.format(**(values | change)))
    with pytest.raises(UserError, match=message):
        published_cells(str(tmp_path))


CLAIM = """
claims:
  mine:
    claim: "C over H: {value}"
    paper: "2605.27678"
    cells: [X-1]
    measure: tflops_per_gpu
    common: ["model={model}", cluster=h100x64, "cluster.num_nodes={nodes}", global_batch=256, seed=0]
    of: [strategy=hetero_colocated, "layout.tp={tp}"]
    to: [strategy=megatron, "layout.tp={tp}"]
    setting: As in a table of my own.
"""
