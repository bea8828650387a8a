"""What of the code is in a key: what a run uses and does, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import entrain_bench
import entrain_bench_strategies
import entrain_bench_workloads
from entrain_bench.base.errors import UserError
from entrain_bench.config.tree import choices
from entrain_bench.records import code
from entrain_bench.records.cells import Cell
from entrain_bench.records.code import DRIVER, code_version, decides_timeline, hash_of, import_closure
from entrain_bench.records.keys import targets_of
from entrain_bench.run.cells import compose_cells

PACKAGES = {module.__name__: Path(module.__path__[0]) for module in
            (entrain_bench, entrain_bench_strategies, entrain_bench_workloads)}  # fmt: skip


@pytest.fixture(scope="module")
def cells() -> dict[str, Cell]:
    found = {name: compose_cells([f"strategy={name}", "model=tiny", "cluster=tiny"])[0] for name in choices("strategy")}
    (train,) = compose_cells(["harness=train", "model=tiny", "cluster=tiny"])
    return found | {"train": train}


class Tree:
    """A copy of all code, to change."""

    def __init__(self, folder: Path) -> None:
        self.roots = {name: folder / name for name in PACKAGES}
        for name, path in PACKAGES.items():
            shutil.copytree(path, self.roots[name], ignore=shutil.ignore_patterns("__pycache__", "*.parquet"))

    def versions(self, cells: dict[str, Cell]) -> dict[str, str]:
        # A process reads its own modules once.
        code._read_own.cache_clear()
        return {
            name: hash_of(
                import_closure(
                    {DRIVER, *(target.rpartition(".")[0] for target in targets_of(cell.config.content()))},
                    self.roots,
                    decides_timeline,
                )
            )
            for name, cell in cells.items()
        }

    def change(self, file: str, old: str, new: str) -> None:
        package, _, inner = file.partition("/")
        path = self.roots[package] / inner
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree")


@pytest.mark.wide
def test_the_copy_has_the_versions_that_runs_have(tree: Tree, cells: dict[str, Cell]) -> None:
    assert tree.versions(cells) == {name: cell.code_version for name, cell in cells.items()}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        # A comment, a line break, a docstring.
        ("entrain_bench/train/measuring.py", "from __future__", "# A comment.\nfrom __future__"),
        ("entrain_bench/costs/truth.py", '"""The hidden cost model of a', '"""Another docstring of a'),
        # A metric's formula, another metric, its range.
        ("entrain_bench/records/metrics.py", "run.flops_per_s / 1e12", "run.flops_per_s / 1e9"),
        (
            "entrain_bench/records/metrics.py",
            "# Metrics of every run",
            "_new = Metric('new', 's')\n# Metrics of every run",
        ),
        ("entrain_bench/costs/bound.py", "return max(critical,", "return min(critical,"),
        # Names and helpers of base that compute nothing.
        ("entrain_bench/base/errors.py", "def explain(", "def describe("),
        ("entrain_bench/base/hosttime.py", "return max(0.0,", "return max(0.0, 0.0,"),
        # Records, configuration that keys hold resolved, rendering.
        ("entrain_bench/records/records.py", "MAX_DEATHS = 2", "MAX_DEATHS = 3"),
        ("entrain_bench/program/table.py", '"displayTimeUnit": "ms"', '"displayTimeUnit": "ns"'),
    ],
)
def test_what_decides_no_timeline_moves_no_key(
    tree: Tree, cells: dict[str, Cell], file: str, old: str, new: str
) -> None:
    before = tree.versions(cells)
    (tree.roots["entrain_bench_strategies"] / "mine.py").write_text("class Mine:\n    size = 1\n")
    tree.change(file, old, new)
    assert tree.versions(cells) == before


@pytest.mark.wide
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("entrain_bench/costs/roofline.py", "GEMM_TILE = 128", "GEMM_TILE = 64"),
        ("entrain_bench/base/arithmetic.py", "LOG_TERMS = 20", "LOG_TERMS = 19"),
        ("entrain_bench/run/experiment.py", "feed.observe(timeline)", "pass"),
        ("entrain_bench/specs/job.py", "def divisors(", "def divisors_of("),
    ],
)
def test_what_decides_every_timeline_moves_all_keys(
    tree: Tree, cells: dict[str, Cell], file: str, old: str, new: str
) -> None:
    before = tree.versions(cells)
    tree.change(file, old, new)
    after = tree.versions(cells)
    assert all(after[name] != before[name] for name in cells)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("file", "old", "new", "moved"),
    [
        ("entrain_bench_strategies/dip.py", "MOVED = 8.0", "MOVED = 9.0", {"dip", "optimus"}),
        ("entrain_bench_strategies/dflop/assigner.py", "PATIENCE = 16", "PATIENCE = 17", {"dflop"}),
        ("entrain_bench_workloads/tokens.py", "_TOKEN_DECIMALS = 3", "_TOKEN_DECIMALS = 4", None),
        ("entrain_bench/train/measuring.py", "MOST_NAMED = 8", "MOST_NAMED = 9", {"train"}),
    ],
)
def test_a_key_moves_with_the_code_that_its_run_uses(
    tree: Tree, cells: dict[str, Cell], file: str, old: str, new: str, moved: set[str] | None
) -> None:
    before = tree.versions(cells)
    tree.change(file, old, new)
    after = tree.versions(cells)
    # Every cell draws from a trace.
    assert {name for name in cells if after[name] != before[name]} == (set(cells) if moved is None else moved)


def version_of(folder: Path, **files: str) -> str:
    """Hash of the module ``mine`` in a folder with these files, named by their paths, beside those it had."""
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    roots = {path.stem: path for path in folder.iterdir()}
    return hash_of(import_closure({"mine"}, roots))


@pytest.mark.parametrize(
    ("imports", "counts"),
    [
        ("import helper", True),
        ("from helper import SIZE", True),
        ("def late():\n    import helper", True),
        ("try:\n    import helper\nexcept ImportError:\n    pass", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import helper", False),
        ("import os", False),
    ],
)
def test_neighbours_count_if_they_are_imported_and_not_for_types_alone(
    tmp_path: Path, imports: str, counts: bool
) -> None:
    first = version_of(tmp_path / "code", mine=imports, helper="SIZE = 1")
    assert (version_of(tmp_path / "code", helper="SIZE = 2") != first) == counts


def test_modules_of_a_package_import_each_other_by_relative_names(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    files = {
        "mine": "import package.inner.deep",
        "package/__init__": "",
        "package/one": "SIZE = 1",
        "package/two": "SIZE = 1",
        "package/inner/__init__": "",
        "package/inner/deep": "from ..one import SIZE\nfrom . import other",
        "package/inner/other": "WIDTH = 1",
    }
    first = version_of(folder, **files)
    assert version_of(folder, **{"package/two": "SIZE = 2"}) == first
    # What a package does when it is imported counts as well.
    changes = {"package/one": "SIZE = 2", "package/inner/other": "WIDTH = 2", "package/__init__": "print()"}
    assert len({first, *(version_of(folder, **{name: text}) for name, text in changes.items())}) == 4


def test_a_neighbour_of_a_lone_module_of_the_users_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helped.py").write_text("from helper import SIZE\n\nclass Mine:\n    size = SIZE\n")
    versions = set()
    for size in (1, 2):
        (tmp_path / "helper.py").write_text(f"SIZE = {size}\n")
        versions.add(code_version.__wrapped__(frozenset({"helped.Mine"})))
    assert len(versions) == 2


def test_bad_code_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.py: line 2: "):
        version_of(tmp_path / "code", mine="import os\nclass")
    with pytest.raises(UserError, match="no module named nope"):
        code_version(frozenset({"nope.Mine"}))


@pytest.mark.wide
def test_versions_of_libraries_that_a_run_imports_are_in_its_key(
    cells: dict[str, Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(module: str) -> set[str]:
        with monkeypatch.context() as patch:
            known = code.releases_of
            patch.setattr(code, "releases_of", lambda name: "other" if name == module else known(name))
            after = {name: code_version.__wrapped__(frozenset(targets_of(cell.config.content())))
                     for name, cell in cells.items()}  # fmt: skip
        return {name for name, cell in cells.items() if after[name] != cell.code_version}

    assert moved("numpy") == moved("numba") == {*cells}
    assert moved("ortools") == {"dflop", "flexsp", "hybrid_cp"}
    assert moved("torch") == moved("megatron") == {"train"}
    assert moved("matplotlib") == moved("rich") == set()
