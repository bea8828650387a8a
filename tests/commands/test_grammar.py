"""One grammar for all verbs: what a line asks for, and the one line that mends a mistake."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.config.grammar import Request, Storage, Verb, own, read
from entrain_bench.config.line import CONFIG_DIR, RUN, split, verb_of


@dataclass(frozen=True, slots=True)
class Keys(Storage):
    """Keys of a verb that is made up."""

    seconds: float | None = own(None, "limit")
    again: bool = own(False, "repeat")


VERB = Verb(Keys, ("model", "layout"), words="what to make")


def asked(*arguments: str) -> tuple[str, Request[Keys]]:
    name, line = verb_of(split(arguments), ["make"])
    return name, read(line, name, VERB)


def test_words_keys_and_options_may_be_mixed() -> None:
    line = ("--config-dir", "mine", "make", "model=tiny", "a", "seconds=2", "results_dir=/a b/c", "+layout.tp=2", "b")
    assert asked(*line) == (
        "make",
        Request(Keys("/a b/c", seconds=2.0), ("a", "b"), ("model=tiny", "+layout.tp=2"), {CONFIG_DIR: "mine"}),
    )
    assert asked(*line)[1].config_dir == "mine"
    assert not asked(*line)[1].multirun


def test_without_a_verb_it_is_a_run() -> None:
    assert asked("model=tiny") == (RUN, Request(Keys(), (), ("model=tiny",)))
    assert asked() == (RUN, Request(Keys()))


def test_values_are_typed_as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "here")
    typed = ("mlflow=no", "mlflow_uri=http://host:1", "seconds=null", "again=true", "results_dir=2024")
    assert asked("make", *typed)[1].keys == Keys("2024", mlflow=False, mlflow_uri="http://host:1", again=True)
    assert asked("make", "results_dir=${oc.env:PLACE}/x")[1].keys.results_dir == "here/x"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("mak", "unknown verb mak. Did you mean make?"),
        ("qqq", "unknown verb qqq. Verbs: make"),
        ("make secods=2", "secods=2: unknown key (did you mean seconds=2?); choices: again, "),
        ("make tp=2", "tp=2: unknown key (did you mean layout.tp=2?); choices: again, "),
        ("make --seconds=2", "--seconds: is a key. Write seconds=2"),
        ("make --results-dir x", "--results-dir: is a key. Write results_dir=VALUE"),
        ("make --nope", "--nope: unknown option; choices: --help, --version, --config-dir"),
        ("make --config-dri x", "--config-dri: unknown option. Did you mean --config-dir?"),
        ("make --multirun", "--multirun: make does not take it; leave it out"),
        ("make --config-dir", "--config-dir: expected one argument"),
        ("make seconds=abc", "seconds=abc: Value 'abc' of type 'str' could not be converted to Float"),
        ("make seconds=1,2", "seconds=1,2: must be seconds=VALUE, with one value"),
        ("make +seconds=1", "+seconds=1: must be seconds=VALUE, with one value"),
        ("make seconds=1 seconds=2", "seconds=2: seconds must be given once"),
        ("make results_dir=[a]", "results_dir=[a]: "),
        ("make results_dir=${nope}", "nope"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_what_mends_it(line: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        asked(*line.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("report chartqa", "chartqa: must be KEY=VALUE. Did you mean workload=chartqa?"),
        (
            "report results_dir=nowhere",
            "results_dir=nowhere: holds no run with a result. Run some first: entrain-bench",
        ),
        ("recommend within=megatorn", "within=megatorn: unknown (did you mean megatron?)"),
        ("trace paht=x", "paht=x: unknown key"),
        ("ledger ledger=none.csv", "ledger=none.csv: must be a CSV file that can be read (FileNotFoundError)"),
        ("ui port=99999", "port=99999: must be in 1..65535"),
        ("verify results_dir=x", "results_dir=x: contains no runs. Name a folder that a sweep has written"),
        ("verify --config-dir x", "--config-dir=x: must be given with results_dir, or left out"),
        ("check", "strategy: must be given: entrain-bench check strategy=NAME"),
        ("check entrain", "entrain: must be KEY=VALUE. Did you mean strategy=entrain?"),
    ],
)
def test_every_verb_says_it_alike(
    line: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(line.split()) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(f"entrain-bench: {says}")


def test_the_version_is_the_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    shown = capsys.readouterr().out
    assert re.fullmatch(r"entrain-bench \d+\.\d+\.\d+( \(commit [0-9a-f]{40}(\+changes)?\))?\n", shown)
