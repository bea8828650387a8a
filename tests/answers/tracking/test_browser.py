"""What a browser shows: the printed links lead to the answer and to the runs' times, and two runs are side by side."""

from pathlib import Path

import pytest

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
    times = [time_text(record) for record in results.records()]
    with opened(results) as pages:
        shown = pages.show_answer(["Decision", "Use", "Gain", "Next step"])
        assert " over megatron" in shown
        pages.show_runs(["megatron", "entrain", "dip"])
        shown = pages.show_comparison(["entrain", "megatron"], ["iteration_time_s", *times])
        # Above it the page names the sweep, with all strategies.
        chart = shown.partition("Parameters:")[2]
        assert "dip" not in chart
        axes = chart.partition("Clear All")[0].split()
        assert [*axes[:1], axes[-1]] == ["Strategy", "iteration_time_s"]
