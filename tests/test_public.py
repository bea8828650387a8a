"""The names for scripts and notebooks, and the commands and examples of README and docs as they are written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import entrain_bench
from entrain_bench.commands.help import TASKS
from entrain_bench.config.compose import Composer
from entrain_bench.config.line import RUN
from entrain_bench.records.records import METRICS
from support.cli import asked

ROOT = Path(__file__).parents[1]
README, PYTHON = ((ROOT / name).read_text() for name in ("README.md", "docs/python.md"))
EXAMPLES = re.findall(r"```python\n(.*?)```", PYTHON, re.DOTALL)
MAX_README_WORDS = 700
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# In a block of code or within a sentence; with an ellipsis it is none.
COMMAND = re.compile(r"(?:^    |`)entrain-bench ((?!.*\.\.\.)[^`\n]+?)(?=  +#|`|$)", re.MULTILINE)
COMMANDS = sorted(
    {*TASKS.values()} | {text for page in PAGES for text in COMMAND.findall(page.read_text().replace("\\\n", " "))}
)
HEAVY = ("torch", "hydra", "pandas", "numpy", "numba", "mlflow", "matplotlib")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"import sys, entrain_bench; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", dir(entrain_bench))
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(entrain_bench, name)
    assert value.__doc__
    assert value.__module__.startswith("entrain_bench.")
    assert name in dir(entrain_bench)


def test_the_readme_is_short() -> None:
    # Comments mark where generated text is put; code is not read as prose.
    words = re.sub(r"<!--.*?-->|<img.*?>|```.*?```|^ {4}.*?$", "", README, flags=re.DOTALL | re.MULTILINE).split()
    assert len(words) <= MAX_README_WORDS


@pytest.mark.wide
@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_of_the_readme_runs_as_written(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example, "README.md", "exec"), {})  # noqa: S102
    shown = capsys.readouterr().out
    # Not of a timeline.
    assert all(
        metric in shown
        for metric in METRICS
        if metric not in ("planning_time_s", "believed_time_s", "failed_iterations")
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_documents_is_one(command: str) -> None:
    asked(command)


@pytest.mark.wide
@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_of_the_documents_composes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    name, request = asked(command)
    # Files and plugins that are not there.
    missing = any(word in command for word in ("plan=", "path=", "my_", "submitit", "optuna", "=mine"))
    if name != RUN or missing or "--help" in command:
        return
    composer = Composer(request.config_dir)
    cells = composer.sweep(request.overrides).cells if request.multirun else (request.overrides,)
    for cell in cells:
        composer.run(cell)
