"""The generated tables of iteration times: means, intervals, the best, and what has no result."""

from __future__ import annotations

from typing import Any

import pandas as pd

from entrain_bench.answers.documents.results import results_markdown


def of_strategy(name: str, *times: float, **changes: Any) -> list[dict[str, Any]]:
    """Runs of a strategy, a seed a time; one that is 0 failed."""
    made = [
        {"iteration_time_s": time, "gap_to_lower_bound": 0.5 - 0.2 * seed, "cluster_bound_s": 0.5}
        if time
        else {"status": "failed"}
        for seed, time in enumerate(times)
    ]
    case = {"strategy": name, "model": "tiny", "workload": "coco", "status": "ok", "reason": "told so"} | changes
    return [case | {"seed": seed} | run for seed, run in enumerate(made)]


def test_results_show_means_intervals_gaps_the_best_and_what_failed() -> None:
    data = pd.DataFrame(
        [
            *of_strategy("first", 1.0, 2.0),
            *of_strategy("second", 1.25, 1.25),
            *of_strategy("third", 1.0, 0.0),
            *of_strategy("fourth", 9.0, status="skipped"),
            *of_strategy("fifth", 2.5, 2.5),
        ]
    )
    half = 12.706205 * 0.5
    assert results_markdown(data).splitlines() == [
        "| model, workload | First | Second | Third | Fourth | Fifth |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        f"| Tiny Coco | 1.500 ± {half:.3f} (40%, 200%) | **1.250 ± 0.000** (40%, 150%) |"
        " 1.000 (50%, 100%), 1 of 2 failed | skipped | 2.500 ± 0.000 (40%, 400%) |",
        "",
        "- Third fails at seed 1 on Tiny Coco: told so",
        "- Fourth is skipped at seed 0 on Tiny Coco: told so",
    ]


def test_every_family_has_a_table_beside_the_baseline() -> None:
    rows = [
        *of_strategy("base", 2.0, strategy_family="out_of_the_box"),
        *of_strategy("paper", 1.0, strategy_family="published"),
        *of_strategy("switch", 4.0, strategy_family="out_of_the_box"),
        *of_strategy("mine", 3.0, strategy_family=""),
    ]
    lines = results_markdown(pd.DataFrame(rows)).splitlines()
    titles = ["### Published systems", "### Out of the box", "### Yours"]
    assert [line for line in lines if line.startswith("#")] == titles
    assert [line for line in lines if "workload" in line] == [
        "| model, workload | Base | Paper |",
        "| model, workload | Base | Switch |",
        "| model, workload | Base | Mine |",
    ]
    # What is fastest of all is bold, of each table italic.
    assert sum("| **1.000** (" in line for line in lines) == sum("**" in line for line in lines) == 1
    assert sum("| *2.000* (" in line for line in lines) == 2
    assert not any(f"*{slower}.000*" in line for line in lines for slower in (3, 4))
