"""Options of parts come from their dataclasses: defaults, which YAMLs get them, when they are read again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from entrain_bench.base.errors import UserError
from entrain_bench.config.comments import text_of
from entrain_bench.config.compose import Composer, compose
from entrain_bench.config.parts import TARGET, options_of, with_options
from entrain_bench.config.targets import trust

CODE = """
from dataclasses import dataclass, field

@dataclass(frozen=True)
class Base:
    \"\"\"Base.

    Attributes:
        limit: tokens of a microbatch; None: as many as memory allows.
    \"\"\"

    limit: int | None = None

@dataclass(frozen=True)
class Part(Base):
    \"\"\"Part.

    Attributes:
        base: another part.
        first, second: ``weights`` of the two
            sides.
    \"\"\"

    base: object = field(kw_only=True)
    first: float = 0.5
    second: tuple[int, ...] = (1, 2)
    label: str = field(default="x", init=False)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    trust(tmp_path)
    monkeypatch.delitem(sys.modules, "some_parts", raising=False)
    (tmp_path / "some_parts.py").write_text(CODE)
    place = tmp_path / "strategy" / "assigner"
    place.mkdir(parents=True)
    (place / "bare.yaml").write_text("_target_: some_parts.Part\n")
    (place / "full.yaml").write_text("_target_: some_parts.Part\nfirst: 0.25\n")
    return tmp_path


def test_every_field_with_a_default_is_an_option(folder: Path) -> None:
    assert options_of("some_parts.Part") == {"limit": None, "first": 0.5, "second": [1, 2]}
    assert options_of("pathlib.Path") == {}
    text = text_of("strategy/assigner", "bare", str(folder))
    assert text.splitlines()[:4] == ["_target_: some_parts.Part", "limit: null", "first: 0.5", "second: [1, 2]"]
    assert "#     limit: tokens of a microbatch; None: as many as memory allows." in text
    assert yaml.safe_load(text) == {TARGET: "some_parts.Part", **options_of("some_parts.Part")}


def test_a_part_with_options_in_its_yaml_keeps_these_alone(folder: Path) -> None:
    bare = {TARGET: "some_parts.Part"}
    assert with_options("strategy/assigner/full", bare | {"first": 0.25}) == bare | {"first": 0.25}
    assert with_options("workload/bare", bare) == bare
    assert with_options("strategy/planner/bare", {TARGET: "no_such_module.Part"}) == {TARGET: "no_such_module.Part"}
    own = str(folder)
    assert compose("strategy/assigner=bare", config_dir=own).strategy["assigner"] == bare | options_of(
        "some_parts.Part"
    )
    assert compose("strategy/assigner=full", config_dir=own).strategy["assigner"] == bare | {"first": 0.25}
    changed = compose("strategy/assigner=bare", "strategy.assigner.second=[3]", config_dir=own).strategy["assigner"]
    assert changed["second"] == [3]
    with pytest.raises(UserError, match=r"frist=1: unknown key \(did you mean strategy.assigner.first=1\?\)"):
        compose("strategy/assigner=bare", "strategy.assigner.frist=1", config_dir=own)


def test_a_changed_default_is_read_again_by_the_next_process(folder: Path) -> None:
    def first() -> object:
        composer = Composer(str(folder))
        found = composer.run(["strategy/assigner=bare"]).strategy["assigner"]["first"]
        composer.save()
        return found

    assert first() == 0.5
    (folder / "some_parts.py").write_text(CODE.replace("first: float = 0.5", "first: float = 0.75"))
    os.utime(folder / "some_parts.py", (1, 1))
    del sys.modules["some_parts"]
    assert first() == 0.75
