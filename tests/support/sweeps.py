"""Random sweeps as users type them: strategies of a folder of theirs, nested overrides, devices, plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pandas as pd

from entrain_bench.answers.commands import commands_of
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer, compose
from entrain_bench.config.line import RUN
from entrain_bench.program.plan_file import Expected, PlannedJob, TrainingPlan, plan_text
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Record, new_record
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import plan_of, prepare
from support.cli import asked

OWN = """
defaults: [{{planner: megatron}}, {{assigner: token_budget}}, {{scheduler: megatron}}]
name: {name}
"""
# What may be swept, each with values to draw of; a value is one word of Hydra's.
CHOICES = {
    "seed": ["0", "1", "2", "7"],
    "cluster/device": ["h100", "a100", "a40"],
    "layout.dp": ["2", "4", "null"],
    "layout.recompute": ["[]", "[llm]", "[vision,llm]"],
    "freeze": ["[]", "[vision]"],
    "speed.gemm": ["0.5", "2"],
    "belief_error": ["0", "0.25"],
    "microbatch_size": ["2", "null"],
    "overlap_grad_reduce": ["true", "false"],
    "strategy.planner.profile_samples": ["8", "16"],
    "strategy/assigner": ["megatron", "token_budget"],
}
STRATEGIES = ["megatron", "entrain", "mine", "other_mine", "disttrain"]
# Names that shells and Hydra's grammar would both take apart.
FILES = ["plain.parquet", "with space, comma.parquet", "it's.parquet", "a=b $(x) {y}.parquet"]


PLAN = "plan, of mine.yaml"
JOB = ("model=tiny", "cluster=a40x16", "global_batch=32")


@dataclass(frozen=True, slots=True)
class DrawnSweep:
    """A sweep: its overrides, and the user's folder if it needs one."""

    overrides: tuple[str, ...]
    config_dir: str | None


def make_folder(folder: Path) -> None:
    """The user's strategies, data and plan, in a folder that is the current one."""
    (folder / "own strategies" / "strategy").mkdir(parents=True)
    for name in ("mine", "other_mine"):
        (folder / "own strategies" / "strategy" / f"{name}.yaml").write_text(OWN.format(name=name))
    for name in FILES:
        pd.DataFrame({"text_tokens": [50] * 40}).to_parquet(folder / name)
    config = compose(*JOB, "strategy=megatron", "layout.dp=2", "microbatch_size=2")
    layout = plan_of(prepare(config), config, None).layout
    job = PlannedJob("tiny", str(config.workload["name"]), "a40x16", 32, 2, 0, ("layout.dp=2",))
    plan = TrainingPlan("megatron", layout.options, job, replace(layout, options=()), Expected(1.0, 1.0, 1.0, 1))
    (folder / PLAN).write_text(plan_text(plan))


def draw(seed: int) -> DrawnSweep:
    random = Random(seed)
    if random.random() < 0.15:
        changed = {key: CHOICES[key] for key in ("seed", "speed.gemm", "overlap_grad_reduce")}
        return DrawnSweep((f"plan={_quoted(PLAN)}", *_some(random, changed, 2)), None)
    strategies = random.sample(STRATEGIES, random.randint(1, 3))
    words = [f"strategy={','.join(strategies)}", *JOB, *_some(random, CHOICES, random.randint(1, 4))]
    if random.random() < 0.4:
        files = random.sample(FILES, random.randint(1, 2))
        words += ["workload=trace", f"workload.path={','.join(map(_quoted, files))}"]
    if random.random() < 0.2:
        words.append(f"workload.name={_quoted('a, b: (c)')}")
    random.shuffle(words)
    own = {*strategies} & {"mine", "other_mine"}
    return DrawnSweep(tuple(words), "own strategies" if own or random.random() < 0.2 else None)


def sweep_problem(seed: int) -> str:
    """The problem with the commands of a drawn sweep, and of half of its runs; empty if there is none.

    The current folder is one of ``make_folder``.
    """
    sweep, random = draw(seed), Random(seed)
    every = records_of(sweep)
    for records in (every, random.sample(every, len(every) // 2)):
        lines = commands_of(records)
        if {cell.key for line in lines for cell in pasted(line)} != {record.key for record in records}:
            return f"other keys: {' '.join(sweep.overrides)}: {lines}"
    return "" if every else f"no cell can run: {' '.join(sweep.overrides)}"


def records_of(sweep: DrawnSweep) -> list[Record]:
    """A record for every cell of a sweep, nothing run; cells that cannot be leave none, as ever."""
    composer, found = Composer(sweep.config_dir), list[Record]()
    for each in composer.sweep(sweep.overrides).cells:
        try:
            found.append(new_record(Cell.composed(each, composer), "failed"))
        except UserError:
            continue
    return found


def pasted(line: str) -> list[Cell]:
    """The cells of a command line, as the shell and the command take it."""
    name, request = asked(line)
    assert name == RUN
    return compose_cells(request.overrides, request.config_dir, request.multirun)


def _some(random: Random, choices: dict[str, list[str]], number: int) -> Iterator[str]:
    for key in random.sample([*choices], number):
        yield f"{key}={','.join(_values(random, choices[key]))}"


def _values(random: Random, values: Sequence[str]) -> list[str]:
    return random.sample(values, random.randint(1, len(values)))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"
