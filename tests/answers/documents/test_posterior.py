"""Posterior runs of a tiny sweep: rounds follow from results, and figures and documents show them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.answers.documents import posterior, results
from entrain_bench.answers.documents.posterior import (
    PosteriorPlan,
    jobs_of,
    posterior_output,
    posterior_runs,
    posterior_sweeps,
)
from entrain_bench.answers.posterior import chances_by_job
from entrain_bench.config import constants
from entrain_bench.config.constants import draws_text, read_draws
from entrain_bench.figures import _runner, iteration_time
from entrain_bench.figures._runner import Drawing
from entrain_bench.records.records import Results
from entrain_bench.records.tables import parquet_of, table_of
from entrain_bench.run.study import Study, bring_up_to_date
from entrain_bench.specs.cluster import Speed

PLAN = PosteriorPlan("jobs", 10.0, 3, {1: 1.0}, 0.02)
# All three run in the first draw, the two that come closest in the others.
SWEEP = """# @package _global_
# Three strategies on one job.
hydra:
  sweeper:
    params:
      strategy: megatron,entrain,disttrain
      model: tiny
      cluster: tiny
      global_batch: 16
      microbatch_size: 2
      iterations: 1
      layout.tp: 1
      layout.dp: 2
      seed: 0,1
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """A study of a sweep of three strategies and a file with three draws."""
    folder, tree = tmp_path / "mine", tmp_path / "tree"
    (folder / "figure").mkdir(parents=True)
    jobs = folder / "figure" / "jobs.yaml"
    jobs.write_text(SWEEP)
    tree.mkdir()
    (tree / "posterior.csv").write_text(draws_text({"A40": {d: Speed(gemm=1 - d / 10) for d in (1, 2, 3)}}))
    monkeypatch.setattr(constants, "config_tree", lambda: tree)
    for module in (posterior, results, _runner):
        monkeypatch.setattr(module, "read_plan", lambda: PLAN)
    read_draws.cache_clear()
    return Study(Results(tmp_path / "results"), str(folder))


def make(study: Study) -> list[tuple[str, str, tuple[str, ...]]]:
    """Bring the output up to date; problem, and the overrides of what ran in order."""
    ran: list[tuple[str, ...]] = []
    (done,) = bring_up_to_date([posterior_output()], study, 0, lambda one, _: ran.append(one.cell.overrides))
    return [(done[0].name, done[1], overrides) for overrides in ran]


@pytest.mark.wide
def test_rounds_follow_from_results_and_are_shown(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert posterior_sweeps(study) == []
    ran = make(study)
    assert {problem for _, problem, _ in ran} == {""}
    values = [{text.partition("=")[0]: text.partition("=")[2] for text in overrides} for _, _, overrides in ran]
    first = [each for each in values if each.get("constants") == "1"]
    later = [each for each in values if each.get("constants") in ("2", "3")]
    assert [len(part) for part in (values, first, later)] == [6 + 3 + 4, 3, 4]
    # Each draw has its own seed; the slowest of the first draw stops.
    assert all(each["seed"] == each["constants"] and each["action_noise"] == "0.02" for each in (*first, *later))
    (job,) = jobs_of(study, PLAN)
    assert job.table is not None
    table = pd.read_csv(study.results.root / "posterior.csv").set_index("strategy")
    winner = str(table["num_fastest"].idxmax())
    remaining = {each["strategy"] for each in later}
    assert winner in remaining
    assert table["num_draws"].tolist() == [3, 3, 3]
    assert table["num_fastest"].sum() == 3
    assert {name: number for name, number in table["num_runs"].items() if name in remaining} == dict.fromkeys(
        remaining, 3
    )
    assert sorted(table["num_runs"]) == [1, 3, 3]
    # Nothing is left to run.
    assert make(Study(study.results, study.config_dir)) == []
    _check_figure(study, winner, tmp_path / "table.parquet", monkeypatch)


def _check_figure(study: Study, winner: str, committed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main figure has a column more, and says the same as the table."""
    drawing = Drawing("iteration_time", iteration_time, {"": ("figure=jobs",)}, ["figures", "iteration_time"])
    assert drawing.shows_draws
    assert drawing.output.bring_up_to_date(study) == ""
    drawn = pd.read_csv(study.results.root / "figures" / "iteration_time.csv").set_index("strategy")
    assert drawn["p_fastest"].sum() == pytest.approx(1.0)
    assert drawn["p_fastest"].idxmax() == winner
    cells = [cell for sweep in posterior_sweeps(study) for cell in study.cells(*sweep)]
    assert len(cells) == 7
    # Where no run has a record, the committed reference says the same; other keys in it do not count.
    before, files = posterior_runs(study), [study.results.record_path(cell.key) for cell in cells]
    committed.write_bytes(parquet_of(table_of(study.results.records())))
    for file in files:
        file.unlink()
    bare = Study(Results(study.results.root), study.config_dir)
    assert posterior_runs(bare).empty
    monkeypatch.setattr(posterior, "COMMITTED", committed)
    assert chances_by_job(posterior_runs(bare)) == chances_by_job(before)
    assert len(posterior_sweeps(bare)) == 1
