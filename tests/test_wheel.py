"""The wheel: what is in it, and that it runs apart from the repository."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "entrain_bench": "entrain_bench",
    "strategies": "entrain_bench_strategies",
    "workloads": "entrain_bench_workloads",
    "experiments": "entrain_bench_experiments",
}
# What pyproject.toml asks for. The installed one is taken, so that no package index is needed.
SETUPTOOLS = 77
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def outside(folder: Path, *command: str | Path) -> str:
    """Output of a command in a folder, without the repository on its path; fails the test if it fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    kept["XDG_CACHE_HOME"] = str(folder / "cache")
    done = subprocess.run([*map(str, command)], cwd=folder, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the repository, for building leaves files behind, and takes in what it finds of them."""
    versions = [found.version for found in importlib.metadata.distributions(name="setuptools")]
    if not versions or int(versions[0].partition(".")[0]) < SETUPTOOLS:
        pytest.skip(f"setuptools >= {SETUPTOOLS} is not installed")
    work = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "results", "*.egg-info")
    shutil.copytree(ROOT, work / "copy", ignore=ignored)
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"
    outside(work / "copy", sys.executable, "-c", build)
    (path,) = work.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which sees the packages that are installed here, but not by their hooks.

    A path file that names a folder adds that folder alone: path files in it, such as an editable install's, do nothing.
    """
    if importlib.util.find_spec("ensurepip") is None:
        pytest.skip("ensurepip is not installed")
    work = tmp_path_factory.mktemp("environment")
    outside(work, sys.executable, "-m", "venv", work / "venv")
    python = work / "venv" / "bin" / "python"
    outside(work, python, "-m", "pip", "install", "--no-index", "--no-deps", wheel)
    site = outside(work, python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    here = dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
    (Path(site) / "dependencies.pth").write_text("\n".join(here))
    return work / "venv"


def test_it_holds_our_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = set()
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".parquet", ".md", ".csv", ".html"):
                expected.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    assert names == expected
    assert "entrain_bench_workloads/traces/chartqa_test_by_image.parquet" in names
    assert "entrain_bench_experiments/config.yaml" in names


def test_it_runs_where_there_is_no_repository(environment: Path, tmp_path: Path) -> None:
    shown = outside(tmp_path, environment / "bin" / "entrain-bench", "strategy=entrain", "workload=chartqa")
    assert "s/iter" in shown
    (path,) = (tmp_path / "results" / "runs").rglob("*.json")
    record = json.loads(path.read_text())
    assert record["status"] == "ok"
    assert record["metrics"]["iteration_time_s"] > record["metrics"]["lower_bound_s"] > 0
