"""``--help``: one screen, true, and the same text as the comments of the configuration."""

from __future__ import annotations

import re

import pytest
import yaml

from entrain_bench.cli import run_command
from entrain_bench.commands.help import TASKS, WIDTH, help_text, takes, verbs
from entrain_bench.config.comments import documented_keys, groups
from entrain_bench.config.compose import Composer
from entrain_bench.config.schema import ConfigSchema

SCREEN = 24


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command(arguments) == 0
    return capsys.readouterr().out


def test_help_is_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help")
    lines = text.splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= WIDTH
    assert all(part in text for part in ("--multirun", "--config-dir", "--help=TOPIC", *verbs()))
    first = [line for line in lines if "  entrain-bench " in line]
    assert [line.rpartition("  entrain-bench ")[2] for line in first] == [*TASKS.values()]
    assert lines[2:8] == first
    assert help_text() + "\n" == text == shown(capsys, "-h") == shown(capsys, "strategy=entrain", "--help")


@pytest.mark.parametrize("name", verbs())
def test_a_verb_shows_its_keys(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, name, "--help")
    assert text.startswith(f"entrain-bench {name}")
    assert all(f"  {each.name}=" in text for each in takes(name).fields)
    assert shown(capsys, "--help", name) == shown(capsys, f"--help={name}") == text


def test_every_key_has_a_comment() -> None:
    names = {key.name.partition(".")[0] for key in documented_keys()}
    assert names == {*ConfigSchema.__dataclass_fields__}
    for key in documented_keys():
        assert len(key.meaning) > 5, key.name


@pytest.mark.wide
def test_defaults_are_those_of_the_configuration() -> None:
    defaults = Composer().defaults
    for key in documented_keys():
        if key.name in groups():
            assert str(defaults[key.name] or "null") == key.default
        else:
            assert yaml.safe_load(key.default) == defaults[key.name.replace("*", "gemm")], key.name


def test_choices_are_shown_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help=strategy")
    assert text.startswith("strategy=NAME, default entrain\n")
    assert re.search(r"^  megatron +Homogeneous degrees", text, re.MULTILINE)
    assert "--help=strategy/planner" in text
    assert shown(capsys, "--help", "strategy=entrain") == shown(capsys, "--help", "strategy") == text
    assert re.search(r"^  dip +DipPlanner$", shown(capsys, "--help=strategy/planner"), re.MULTILINE)
    assert "model/module@model.modules.llm=NAME" in shown(capsys, "--help=model/module")
    for group, choices in groups().items():
        lines = shown(capsys, f"--help={group}").splitlines()
        assert all(any(line.split()[:1] == [name] for line in lines) for name in choices)
        assert max(map(len, lines)) <= WIDTH
