"""Mistakes that are made, and the tests that are to notice them, on a few lines of code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mutants.__main__ import make_mutant, mistakes_in
from mutants.running import Coverage, passes

SOURCE = '''\
@cache
def share(total: int | None, parts: int = 2) -> dict[str, int]:
    """Not 1 word of this."""
    assert parts > 0
    if total is None:
        raise ValueError(f"total={total}: must be less than {parts - 1}")
    return dict(zip("a", [total - parts], strict=True))
'''


def test_mistakes_are_made_where_something_is_decided() -> None:
    mistakes = [mistake[3:] for mistake in mistakes_in(SOURCE, "share.py", 0)]
    mutants = [make_mutant("share.py", *mistake, SOURCE) for mistake in mistakes]
    changed = {(mutant.line, mutant.after) for mutant in mutants if mutant}
    assert {line for line, _ in changed} == {2, 5, 7}
    assert {after for line, after in changed if line == 5} == {"if not total is None:", "if total is not None:"}
    operators = ["+", "*", "/", "//", "%", "**"]
    assert {after for line, after in changed if line == 7} == {
        f'return dict(zip("a", [total {operator} parts], strict=True))' for operator in operators
    }


def test_tests_of_the_line_come_first_then_the_mirror_and_the_quickest_first(tmp_path: Path) -> None:
    seconds = {
        "tests/a::slow": 100.0,
        "tests/a::slower": 110.0,
        "tests/b::1": 2.0,
        "tests/b::2": 1.0,
        "tests/c::1": 0.5,
    }
    lines = [["a.py", 3, [2, 1, 3]], ["a.py", 9, [4]]]
    (tmp_path / "record").write_text(json.dumps([seconds, lines]))
    coverage = Coverage([tmp_path / "record"])
    # The slow test of the mirror is beyond the budget.
    chosen = coverage.choose("a.py", 3, ("tests/a",), ())
    assert [*chosen] == ["tests/b::2", "tests/b::1", "tests/a::slower", "tests/c::1"]


@pytest.mark.wide
def test_a_test_is_recorded_and_notices_a_mistake(tmp_path: Path) -> None:
    halves = tmp_path / "names" / "halves.py"
    halves.parent.mkdir()
    halves.write_text("def half(total):\n    return total // 2\n\ndef unused():\n    return 1\n")
    test = "from halves import half\n\ndef test_half():\n    assert half(4) == 2\n"
    (tmp_path / "test_halves.py").write_text(test)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    record = tmp_path / "record"
    assert passes(tmp_path, tmp_path, {"test_halves.py": 0.0}, record)
    coverage = Coverage([record])
    assert {*coverage.lines} == {("names/halves.py", 2)}
    tests = coverage.choose("names/halves.py", 2, (), ())
    assert [*tests] == ["test_halves.py::test_half"]
    assert passes(tmp_path, tmp_path, tests)
    halves.write_text("def half(total):\n    return total / 3\n")
    assert not passes(tmp_path, tmp_path, tests)
