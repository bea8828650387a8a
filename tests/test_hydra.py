"""Hydra's own options, launchers and sweepers do what Hydra's documentation says."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from entrain_bench.cli import run_command
from entrain_bench.config.compose import compose
from support.cli import SMALL, run

SWEEPER = '''
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper


class Halving(Sweeper):
    """Halves a key as long as that lowers what the runs return."""

    def __init__(self, key, params=None):
        self.key = key

    def setup(self, *, hydra_context, task_function, config):
        from hydra.core.plugins import Plugins

        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        (value,) = (int(text.partition("=")[2]) for text in arguments if text.startswith(f"{self.key}="))
        others = [text for text in arguments if not text.startswith(f"{self.key}=")]
        seen = [float("inf")]
        while value >= 1:
            (run,) = self.launcher.launch([[*others, f"{self.key}={value}"]], initial_job_idx=len(seen))
            if run.return_value >= seen[-1]:
                break
            seen.append(run.return_value)
            value //= 2


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="halving",
    node={"_target_": f"{__name__}.Halving", "key": "microbatch_size", "params": None},
)
'''


# The sweepers choose this key.
OTHERS = [text for text in SMALL if not text.startswith("microbatch_size=")]


def in_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own: Hydra configures logging for the rest of a process."""
    command = [sys.executable, "-m", "entrain_bench.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.wide
def test_a_configuration_is_printed_as_it_is_composed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = yaml.safe_load(printed(capsys, "--cfg", "job", "strategy=dip", "layout.tp=1", "~seed", "--resolve"))
    config = compose("strategy=dip", "layout.tp=1")
    assert shown["strategy"] == config.strategy
    assert shown["model"] == config.model
    assert shown["layout"]["tp"] == 1
    package = printed(capsys, "--cfg", "job", "--package", "cluster", "cluster=4xh100")
    assert yaml.safe_load(package)["name"] == "h100x4"
    assert "sweeper:" in printed(capsys, "-c", "hydra")


@pytest.mark.wide
def test_other_options_of_hydra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "strategy/planner/dip" in in_process("--info", "defaults", "strategy=dip").stdout
    assert str(tmp_path) in in_process("--info", "searchpath", "--config-dir", str(tmp_path)).stdout
    assert "Hydra" in in_process("--hydra-help").stdout
    assert run_command(["recommend", "--cfg", "job"]) == 2
    assert "--cfg: recommend does not take it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "choices"),
    [
        ("strategy=d", {"strategy=dep", "strategy=dflop", "strategy=dip", "strategy=disttrain", "strategy=dynapipe"}),
        ("seed=0 layout.t", {"layout.tp="}),
    ],
)
def test_words_are_completed(
    typed: str, choices: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", f"entrain-bench {typed}")
    assert {*printed(capsys, "-sc", "query=bash").split()} == choices


@pytest.mark.wide
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_after_the_line_that_hydra_documents(tmp_path: Path) -> None:
    command = tmp_path / "entrain-bench"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m entrain_bench.cli "$@"\n')
    command.chmod(0o755)
    script = (
        'eval "$(entrain-bench -sc install=bash)"\n'
        'COMP_LINE="entrain-bench workload=char"; COMP_POINT=${#COMP_LINE}; COMP_CWORD=1\n'
        'hydra_bash_completion\necho "${COMPREPLY[@]}"\n'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    bash = [str(shutil.which("bash")), "-c", script]
    done = subprocess.run(bash, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["workload=chartqa", "workload=chartqa_qa"]


@pytest.mark.wide
@pytest.mark.skipif(not importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher"), reason="needs joblib")
def test_runs_of_joblibs_launcher(tmp_path: Path) -> None:
    assert run(tmp_path, "--multirun", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=0,1") == 0
    assert pd.read_csv(tmp_path / "table.csv")["status"].tolist() == ["ok", "ok"]


def test_where_hydra_writes_is_ignored_with_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "results", "--multirun", f"hydra.sweep.dir={tmp_path / 'other'}", "seed=0") == 0
    assert "is ignored; records and figures go to results_dir" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.wide
@pytest.mark.skipif(not importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper"), reason="needs optuna")
def test_optuna_finds_the_fastest_microbatch(tmp_path: Path) -> None:
    sweeper = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=8",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=1",
    ]
    given = [*OTHERS, f"results_dir={tmp_path}", "microbatch_size=choice(1,2,4)"]
    done = in_process("--multirun", *sweeper, *given)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "table.csv").set_index("microbatch_size")["iteration_time_s"]
    best = yaml.safe_load((tmp_path / "hydra" / "optimization_results.yaml").read_text())
    assert best["best_params"]["microbatch_size"] == table.idxmin()
    assert best["best_value"] == pytest.approx(table.min())


@pytest.mark.wide
def test_a_sweeper_of_anybodys(tmp_path: Path) -> None:
    plugin = tmp_path / "plugins" / "hydra_plugins"
    plugin.mkdir(parents=True)
    (plugin / "halving.py").write_text(SWEEPER)
    given = [*OTHERS, f"results_dir={tmp_path}", "hydra/sweeper=halving", "microbatch_size=4"]
    done = in_process("--multirun", *given, PYTHONPATH=str(tmp_path / "plugins"))
    assert done.returncode == 0, done.stderr
    tried = {*pd.read_csv(tmp_path / "table.csv")["microbatch_size"]}
    assert {4, 2} <= tried <= {4, 2, 1}
    assert "microbatch_size" in done.stdout
