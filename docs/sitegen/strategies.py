"""A page for each strategy: facts, its schedule on one batch, then the committed page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from entrain_bench.answers.labels import StrategyFacts
from entrain_bench.answers.text import markdown_table
from entrain_bench.base.errors import UserError
from entrain_bench.commands.help import help_text
from entrain_bench.config.tree import config_tree
from entrain_bench.figures import schedule_gantt
from entrain_bench.figures._style import styled
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results
from entrain_bench.run.cells import compose_cells, run_cells
from entrain_bench.run.parallel import num_processes

BASELINE = "megatron"
# One batch, model and node for all strategies. Planners choose by their own trials, which are faster than the tuner.
JOB = (
    *("workload=opencqa_ocr", "model=qwen25vl_llama3_1b", "cluster=tiny", "cluster.gpus_per_node=8", "layout.tp=1"),
    *("global_batch=32", "microbatch_size=4", "iterations=1", "seed=0", "tuning=own"),
)
WORDS = "8 A40 GPUs, 32 samples of OpenCQA OCR in microbatches of 4, Qwen2.5-VL's vision encoder with Llama 3.2 1B"
# Strategies whose weights are sharded over all ranks; the others have two replicas.
SHARDED = ("flexsp", "fsdp", "orchmllm", "veomni")
HERE = "this suite: `simulate`; `train` where the strategy allows it (tested on CPU ranks)"


def simulate(strategies: Sequence[str], results: Results) -> dict[str, Cell]:
    """The cell of each strategy's schedule, simulated if ``results`` lacks it.

    ``UserError`` naming page and strategy of one that cannot run.
    """
    cells = {strategy: _cell(strategy) for strategy in strategies}
    for done in run_cells(cells.values(), results, processes=num_processes(), retry_failed=True):
        strategy = done.cell.config.strategy["name"]
        record = done.record
        problem = done.problem if record is None else "" if record.status == "ok" else record.reason
        if problem:
            raise UserError(_where(str(strategy), problem))
    return cells


def _cell(strategy: str) -> Cell:
    dp = 8 if strategy in SHARDED else 2
    try:
        (cell,) = compose_cells((f"strategy={strategy}", *JOB, f"layout.dp={dp}"))
    except UserError as error:
        raise UserError(_where(strategy, str(error))) from error
    return cell


def _where(strategy: str, problem: str) -> str:
    return f"docs/strategies/{strategy}.md: strategy={strategy}: {problem}"


def strategy_page(
    strategy: StrategyFacts,
    text: str,
    papers: Mapping[str, str],
    cells: Mapping[str, Cell],
    results: Results,
    folder: Path,
) -> str:
    """Return a strategy's page in ``docs/strategies``, and draw its schedule in the page's folder.

    ``text`` is its committed page, empty if it shares one; ``papers`` are systems with claims by their page; ``cells``
    are the schedules of all strategies.
    """
    cell = cells[strategy.name]
    draw_schedule([cells[BASELINE], cell], results, folder / f"{strategy.name}.svg")
    record = results.read(cell.key)
    assert record is not None
    row = record.row
    said = f"{row['iteration_time_s']:.2f} s per iteration, GPUs idle {row['bubble_ratio']:.0%}; {row['layout']}"
    command = " ".join(("entrain-bench", *cell.overrides))
    parts = [f"# {strategy.label}", strategy.summary, facts_table(strategy, papers), "## Its schedule"]
    parts += [f"![Passes of {strategy.label} over time]({strategy.name}.svg)"]
    parts += [f"*{said}. The slowest replica; the same batch on every page: {WORDS}.*", f"```sh\n{command}\n```"]
    shared = f"Planning, options, deviations and measured tables: [{strategy.page}]({strategy.page})."
    parts += ["## How it works", text.partition("\n")[2].strip() or shared, "## All options", *options(strategy.name)]
    return "\n\n".join(parts) + "\n"


def options(strategy: str) -> list[str]:
    """The screens of ``--help`` on the planner, assigner and scheduler that a strategy chooses."""
    stated = yaml.safe_load((config_tree() / "strategy" / f"{strategy}.yaml").read_text())
    chosen = [f"strategy/{part}/{name}" for entry in stated["defaults"] for part, name in entry.items()]
    return [f"`entrain-bench --help={topic}`\n\n```text\n{help_text(topic)}\n```" for topic in chosen]


def facts_table(strategy: StrategyFacts, papers: Mapping[str, str]) -> str:
    """Return a table of a strategy's choice, family, needs and papers."""
    page = strategy.page.partition(".")[0]
    entries = {
        "choose it": f"`strategy={strategy.name}`",
        "family": strategy.family,
        "balances": "; ".join(strategy.balances),
        "needs": "; ".join(strategy.needs),
        "paper": ", ".join(f"[arXiv:{number}](https://arxiv.org/abs/{number})" for number in strategy.paper),
        "authors' code": strategy.code or "we found none that is public",
        "runs today": "; ".join([HERE, *(strategy.runs_in or ["in no other framework that we know"])]),
        "claims": f"[{papers[page]}](../claims/{page}.md)" if page in papers else "",
    }
    rows = [f"* - {name}\n  - {text}" for name, text in entries.items() if text]
    return "\n".join([":::{list-table}", ":stub-columns: 1", ":widths: 20 80", "", *rows, ":::"])


def overview(strategies: Iterable[StrategyFacts]) -> str:
    """A table of all strategies for the page of their section."""
    rows = []
    for strategy in strategies:
        link = f"[{strategy.label}]({strategy.name}.md)"
        runs_in = "; ".join(strategy.runs_in) or "here only"
        rows.append([link, strategy.family, "; ".join(strategy.balances), runs_in])
    return markdown_table(["strategy", "family", "balances", "where it runs today"], rows)


def draw_schedule(cells: list[Cell], results: Results, path: Path) -> None:
    """Write the passes of several strategies over one time axis as SVG."""
    cells = [*{cell.key: cell for cell in cells}.values()]
    with styled():
        figure = schedule_gantt.draw(schedule_gantt.load(cells, results)).figure
        figure.savefig(path, metadata={"Date": None})
