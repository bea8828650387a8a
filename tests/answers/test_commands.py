"""Printed commands, pasted, give the same record keys: of random sweeps, and of what is awkward to quote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from entrain_bench.answers.commands import COMMAND, commands_of, decisive_overrides, num_unknown, quoted
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.grammar import RUN
from entrain_bench.config.overrides import parse
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Record, new_record
from entrain_bench.run.cells import compose_cells
from support.cli import asked
from support.records import record, runs
from support.sweeps import draw, make_folder

NUM_SWEEPS = 20


def pasted(line: str) -> list[Cell]:
    """The cells of a command line, as the shell and the command take it."""
    assert line.startswith(f"{COMMAND} ")
    name, request = asked(line)
    assert name == RUN
    return compose_cells(request.overrides, request.config_dir, request.multirun)


def records_of(overrides: Sequence[str], config_dir: str | None = None) -> list[Record]:
    """A record for every cell of a sweep, nothing run; cells that cannot be are left out, as they leave none."""
    composer, found = Composer(config_dir), list[Record]()
    for each in composer.sweep(overrides).cells:
        try:
            found.append(new_record(Cell.composed(each, composer), "failed"))
        except UserError:
            continue
    return found


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(NUM_SWEEPS))
def test_commands_of_random_sweeps_give_the_same_keys(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_sweep(seed, tmp_path, monkeypatch)


def check_sweep(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    make_folder(folder)
    sweep = draw(seed)
    every = records_of(sweep.overrides, sweep.config_dir)
    random = Random(seed)
    # Also of a part of the sweep, which is no product.
    for records in (every, random.sample(every, max(1, len(every) // 2))) if every else ():
        lines = commands_of(records)
        assert {cell.key for line in lines for cell in pasted(line)} == {each.key for each in records}, lines
        assert len(lines) <= len(records)


def test_a_product_is_one_line_and_the_rest_few() -> None:
    every = runs({"first": [1.0] * 3, "second": [1.0] * 3})
    assert commands_of(every) == ["entrain-bench --multirun strategy=first,second workload=coco seed=0,1,2"]
    assert commands_of(every[:-1], "else where") == [
        "entrain-bench --multirun strategy=first workload=coco seed=0,1,2 'results_dir='\"'\"'else where'\"'\"''",
        "entrain-bench --multirun strategy=second workload=coco seed=0,1 'results_dir='\"'\"'else where'\"'\"''",
    ]
    assert commands_of(every[:1]) == ["entrain-bench strategy=first workload=coco seed=0"]


def test_where_results_go_and_how_a_sweep_is_launched_is_left_out() -> None:
    made = ["results_dir=x", "mlflow=false", "retry=failed", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert decisive_overrides([*made, "figure=quick", "seed=1", "seed=2", "+figure.strategies=[all]"]) == {"seed": "=2"}


def test_values_that_a_figure_sets_for_single_runs_are_kept(tmp_path: Path) -> None:
    (tmp_path / "figure").mkdir()
    sweep = "# @package _global_\nhydra: {sweeper: {params: {seed: 0}}}\nglobal_batch: 64\nlayout: {tp: null}\n"
    (tmp_path / "figure" / "own.yaml").write_text(sweep)
    found = decisive_overrides(["figure=own", "seed=0", "layout.tp=4"], str(tmp_path))
    assert found == {"global_batch": "=64", "layout.tp": "=4", "seed": "=0"}


def test_of_older_records_no_command_is_known() -> None:
    older = replace(record("first", 1.0), overrides=(), made_at="")
    assert (commands_of([older]), num_unknown([older])) == ([], 1)
    plain = replace(older, made_at="2026-11-23T00:00:00+00:00")
    assert commands_of([plain]) == ["entrain-bench"], "the defaults have no overrides"


@pytest.mark.parametrize(
    "value",
    [
        "plain",
        "a b",
        "a,b",
        "it's",
        '"',
        "\\",
        "\\'",
        "a\\",
        "1",
        "null",
        "true",
        "",
        "${x}",
        "é",
        None,
        1.5,
        [1, "a,b"],
    ],
)
def test_values_are_read_as_they_were(value: object) -> None:
    (read,) = (parse(f"key={text}").value() for text in [quoted(value)])
    assert [str(each) for each in read] == [str(each) for each in value] if isinstance(value, list) else read == value
