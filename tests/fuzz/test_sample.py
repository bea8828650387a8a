"""A few of the fuzzer's cases, always the same, and that it notices what is wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fuzz.__main__ import cases
from fuzz.draw import SMALL
from fuzz.trial import Case, try_case


def test_a_sample_ends_with_results_or_one_line(tmp_path: Path) -> None:
    tried = cases(1, 5, 8, 1, str(tmp_path))
    assert tried == cases(1, 5, 8, 1, str(tmp_path))
    assert {case.words or case.trace or case.sweep: problem for case in tried if (problem := try_case(case))} == {}


@pytest.mark.parametrize(("error", "says"), [(KeyError("k"), "KeyError: 'k'"), (GeneratorExit(), "raises")])
def test_what_breaks_inside_is_noticed(
    error: BaseException, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("entrain_bench.commands.run.main", fail)
    assert says in try_case(Case(str(tmp_path), ("seed=1",)))


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("entrain-bench: seed=-1: must be in 0..2^32-1", ""),
        ("", "exit code 2 and no line of ours: "),
        ("seed is wrong", "exit code 2 and no line of ours: seed is wrong"),
        ("x.py:1: RuntimeWarning: overflow\nentrain-bench: seed=-1: wrong", "exit code 2 and 2 lines"),
    ],
)
def test_bad_input_is_answered_with_one_line(
    said: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> int:
        print(said, file=sys.stderr)
        return 2

    monkeypatch.setattr("entrain_bench.commands.run.main", refuse)
    assert try_case(Case(str(tmp_path), ("seed=1",))) == problem


def test_values_are_also_drawn_that_let_a_run_go_on(tmp_path: Path) -> None:
    """Of other kinds than their keys take, none would come further than the first check."""
    drawn = [case.words for case in cases(0, 200, 0, 0, str(tmp_path))]
    changed = {
        word for words in drawn for word in words[len(SMALL) :] if word.startswith(("model.modules.", "layout."))
    }
    assert len({word for word in changed if re.fullmatch(r"[\w.]+=[1-9]\d*", word)}) >= 10
