"""What a browser shows: the printed links lead to the answer and to the runs' times, and two runs are side by side."""

from pathlib import Path

import pytest

from entrain_bench.answers.tracking.local import LocalStore
from entrain_bench.cli import run_command
from entrain_bench.records.records import Results
from support.browser import chromium, opened, time_text

SMALL = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.dp=1", "iterations=2"]


@pytest.mark.site
@pytest.mark.timeout(400)
@pytest.mark.skipif(chromium() is None, reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)")
def test_the_pages_answer(tmp_path: Path) -> None:
    sweep = [*SMALL, f"results_dir={tmp_path}", "--multirun", "strategy=megatron,entrain,dip", "seed=0"]
    assert run_command(sweep) == 0
    results = Results(tmp_path)
    records = {record.labels["strategy"]: record for record in results.records()}
    ((experiment, _, _),) = LocalStore(results).experiments()
    run_ids = {run.key: run.run_id for run in LocalStore(results).runs(experiment)}
    with opened(results) as pages:
        shown = pages.show_answer(["Decision", "Use", "Gain", "Next step"])
        assert " over megatron" in shown
        names = [f"{strategy} seed 0" for strategy in records]
        shown = pages.show_runs([*names, *map(time_text, records.values())])
        assert "answer/speedup_over_megatron" in shown
        two = [records["entrain"], records["megatron"]]
        shown = pages.show_comparison(
            [run_ids[record.key] for record in two], ["entrain seed 0", "megatron seed 0", *map(time_text, two)]
        )
        assert "dip seed 0" not in shown
        # Only rows in sight are there.
        assert {"answer/iteration_time_s", "answer/speedup_over_megatron"} <= {*shown.splitlines()}
