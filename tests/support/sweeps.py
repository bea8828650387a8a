"""Random sweeps as users type them: strategies of a folder of theirs, nested overrides, devices, plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pandas as pd

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


def draw(seed: int, plan: str = "") -> DrawnSweep:
    """A sweep that follows from the seed.

    Args:
        seed: of the draw.
        plan: a plan's file, which some sweeps run; empty for none.
    """
    random = Random(seed)
    if plan and random.random() < 0.2:
        return DrawnSweep((f"plan={plan}", *_some(random, {"seed": CHOICES["seed"]}, 1)), None)
    strategies = random.sample(STRATEGIES, random.randint(1, 3))
    words = [f"strategy={','.join(strategies)}", "model=tiny", "cluster=a40x16", "global_batch=32"]
    words += _some(random, CHOICES, random.randint(1, 4))
    if random.random() < 0.4:
        files = random.sample(FILES, random.randint(1, 2))
        words += ["workload=trace", f"workload.path={','.join(map(_quoted, files))}"]
    if random.random() < 0.2:
        words.append(f"workload.name={_quoted('a, b: (c)')}")
    random.shuffle(words)
    own = {*strategies} & {"mine", "other_mine"}
    return DrawnSweep(tuple(words), "own strategies" if own or random.random() < 0.2 else None)


def _some(random: Random, choices: dict[str, list[str]], number: int) -> Iterator[str]:
    for key in random.sample([*choices], number):
        yield f"{key}={','.join(_values(random, choices[key]))}"


def _values(random: Random, values: Sequence[str]) -> list[str]:
    return random.sample(values, random.randint(1, len(values)))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"
