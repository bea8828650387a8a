"""Files of claims and tables: defaults, anchors, nested lists, fields and merged overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entrain_bench.answers.documents.definition import (
    check_keys,
    insert,
    merge_overrides,
    overrides,
    read_definitions,
    words,
)
from entrain_bench.base.errors import UserError


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
    assert load(tmp_path, content) == {
        "one": {"text": "hello you", "value": 1},
        "two": {"text": "hello you", "value": 2},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thing: {}", "mine.yaml: key=thing: must be one of things, defaults, shared"),
        ("shared: {}", "mine.yaml: key=things: must be stated"),
        ("things: {one: {txet: a}}", r"mine.yaml: one: key=txet: unknown \(did you mean text\?\)"),
        ("things: {one: {value: a}}", "mine.yaml: one: text: missing"),
        ("things: {one: *none}", "mine.yaml: .*undefined alias"),
        ("things: [", "mine.yaml: .*expected the node content"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_nested_lists_are_one_list_whose_later_overrides_replace_earlier_ones() -> None:
    assert overrides([["model=m", ["seed=0", "a=1"]], "seed=1", "+z=1"]) == ("model=m", "seed=1", "a=1", "+z=1")
    assert merge_overrides(["a=1", "b=1"], ["b=2", "c=1", "+a=3"]) == ["+a=3", "b=2", "c=1"]


def test_texts_are_joined_and_fields_inserted() -> None:
    value = {"{who}": [["one\n two", "{who},"], "{kind: of, text}"]}
    assert {key: words(text) for key, text in insert(value, {"who": "you"}).items()} == {
        "you": "one two you, {kind: of, text}"
    }
    with pytest.raises(UserError, match=r"field=whom: unknown .did you mean who"):
        insert(["{whom}"], {"who": 1})
