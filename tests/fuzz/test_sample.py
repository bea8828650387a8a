"""A few of the fuzzer's cases, always the same, and that it notices what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.__main__ import cases
from fuzz.trial import Case, try_case


def test_a_sample_ends_with_results_or_one_line(tmp_path: Path) -> None:
    tried = cases(1, 5, 8, str(tmp_path))
    assert tried == cases(1, 5, 8, str(tmp_path))
    assert {case.words or case.trace: problem for case in tried if (problem := try_case(case))} == {}


@pytest.mark.parametrize(("error", "says"), [(KeyError("k"), "KeyError: 'k'"), (GeneratorExit(), "raises")])
def test_what_breaks_inside_is_noticed(
    error: BaseException, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("entrain_bench.commands.run.main", fail)
    assert says in try_case(Case(str(tmp_path), ("seed=1",)))
