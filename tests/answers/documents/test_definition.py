"""Files of definitions: defaults, cases, fields, shared values and merged overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entrain_bench.answers.documents.definition import Source, load_definitions
from entrain_bench.base.errors import UserError

KEYS = {"text", "value", "common", "side", "show"}


def load(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "mine.yaml").write_text(text)
    return dict(load_definitions(tmp_path / "mine.yaml", "things", KEYS, lambda *each: each, verbatim="show"))


def test_a_case_fills_the_fields_of_its_definition(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        """
defaults: {common: [seed=0, a=1]}
shared:
  job: [model=m, cluster=c]
  greeting: "hello {who}"
  noise: {why: because, common: [n=1]}
things:
  family:
    text: "{greeting} {value}"
    common: ["{job}", "workload={data}"]
    side: {common: [b=1], note: "{noise}"}
    data: coco
    cases:
      one: {value: 1, who: you}
      two: {value: [2, 3], who: me, data: chartqa, common: [a=2, +z=1], side: {common: [c=1, b=2]}}
  alone: {text: "{kind: of, text}", show: "{value}"}
""",
    )
    assert list(found) == ["one", "two", "alone"]
    noise = {"why": "because", "common": ["n=1"]}
    assert found["one"] == {
        "text": "hello you 1",
        "value": 1,
        "common": ["seed=0", "a=1", "model=m", "cluster=c", "workload=coco"],
        "side": {"common": ["b=1"], "note": noise},
    }
    # Overrides of the same key are replaced where they are; others follow.
    assert found["two"]["common"] == ["seed=0", "a=2", "model=m", "cluster=c", "workload=chartqa", "+z=1"]
    assert found["two"]["side"] == {"common": ["b=2", "c=1"], "note": noise}
    # Braces around anything but a name are text, and so is everything under the key that is kept.
    assert found["alone"] == {"common": ["seed=0", "a=1"], "text": "{kind: of, text}", "show": "{value}"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thing: {}", "mine.yaml: key=thing: must be one of things, defaults, shared"),
        ("shared: {}", "mine.yaml: key=things: must be stated"),
        ("{things: {}, shared: {value: 1}}", "shared.value=value: must be a name that is no key"),
        ("things: {one: {text: '{who}'}}", "mine.yaml: one: field=who: unknown"),
        ("things: {one: {text: '{who}', who: 'a {who}'}}", "one: field=who: must be free of itself"),
        ("things: {one: {txet: a}}", r"mine.yaml: one: key=txet: unknown \(did you mean text\?\)"),
        ("things: {all: {text: a, cases: {one: {}, two: {vlaue: 1}}}}", "two: key=vlaue: unknown .did you mean value"),
        ("things: {all: {text: a, who: b, cases: {one: {}}}}", "all: key=who: unknown"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(tmp_path, text)


def test_a_matrix_stands_for_all_combinations(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        """
shared:
  sides: {first: [a=1], second: "{other}"}
  other: [b=2]
things:
  many: {text: "{row}, {column}", common: "{sides[column]}", matrix: {row: [A-1, B], column: [first, second]}}
""",
    )
    assert [*found] == ["many_a_1_first", "many_a_1_second", "many_b_first", "many_b_second"]
    assert found["many_a_1_second"] == {"text": "A-1, second", "common": ["b=2"]}
    assert found["many_b_first"] == {"text": "B, first", "common": ["a=1"]}


def test_a_source_gives_fields_and_expands_patterns(tmp_path: Path) -> None:
    entries = {"X-1": {"text_of": "one", "size": 1}, "X-2": {"text_of": "two", "size": 2}}
    source = Source(
        "show",
        lambda names: entries[names[0]],
        "entry",
        lambda pattern: [name for name in entries if name.startswith(pattern.rstrip("*"))],
    )
    (tmp_path / "mine.yaml").write_text(
        """
things:
  many: {show: ["{entry}"], text: "{text_of}", value: "{size}", size: 7, matrix: {entry: ["X-*"]}}
  one: {show: [X-2], text: "{text_of}", value: "{size}"}
"""
    )
    found = dict(load_definitions(tmp_path / "mine.yaml", "things", KEYS, lambda *each: each, source=source))
    assert found == {
        "x_1": {"show": ["X-1"], "text": "one", "value": 7},
        "x_2": {"show": ["X-2"], "text": "two", "value": 7},
        "one": {"show": ["X-2"], "text": "two", "value": 2},
    }


def test_an_entry_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"one: sides=third: unknown; choices: first"):
        load(tmp_path, 'things: {one: {text: "{sides[which]}", sides: {first: 1}, which: third}}')
