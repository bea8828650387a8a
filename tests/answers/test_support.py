"""Tables of supported combinations: an empty cell has its reason."""

from __future__ import annotations

import pytest

from entrain_bench.answers.support import YES, attempt, devices_table, families_table, strategies_table, with_notes
from entrain_bench.base.errors import UserError
from entrain_bench.config.tree import choices


def test_a_refusal_is_its_first_sentence_and_shown_as_a_number() -> None:
    def refuse() -> None:
        raise UserError("layout.ep=3: must divide the 8 experts. Use 2")

    assert attempt(refuse) == "layout.ep=3: must divide the 8 experts"
    assert attempt(lambda: None) == YES
    rows = [["a", YES, attempt(refuse)], ["b", attempt(refuse), "fixed"]]
    numbered = [["a", YES, "no (1)"], ["b", "no (1)", "fixed"]]
    assert with_notes(rows) == (numbered, ["layout.ep=3: must divide the 8 experts"])


@pytest.mark.wide
def test_devices_and_families_say_what_is_known_and_what_is_not() -> None:
    devices = {name: cells for name, *cells in devices_table()[1]}
    assert devices["H100-SXM"] == ["fitted", "flash3", YES]
    assert devices["GB200"][0] == "derived"
    assert "no rate of its 8-bit products" in devices["A100-SXM-80GB"][2]
    families = {name: cells for name, *cells in families_table()[1]}
    assert families["qwen2_5_vl"][1:] == [YES, YES, "text, image, video"]
    assert families["deepseek_v3"][2] == "model.modules.llm.latent: is not supported with harness=train"


@pytest.mark.wide
def test_every_strategy_has_a_result_or_a_reason_for_every_feature() -> None:
    headings, rows = strategies_table()
    assert [row[0] for row in rows if row[0] not in choices("strategy")] == []
    assert len(rows) == len(choices("strategy"))
    for row in rows:
        assert len(row) == len(headings)
        assert all(cell == YES or ": " in cell for cell in row[1:-1]), row
    cells = {name: cells for name, *cells in rows}
    assert {*cells["megatron"][:-1]} == {YES}
    assert "has a generator" in cells["entrain"][headings.index("generator") - 1]
    assert cells["megatron"][headings.index("train") - 1] == YES
