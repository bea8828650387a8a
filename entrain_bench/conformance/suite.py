"""The conformance suite: which checks a strategy goes through, on which runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from time import perf_counter
from typing import Any

from entrain_bench.base.errors import IncompatibleError, UserError, explain
from entrain_bench.config.compose import Composer
from entrain_bench.config.schema import RunConfig
from entrain_bench.conformance import checks
from entrain_bench.conformance.checks import ViolationError, require_valid

SMALL = ("global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2", "iterations=1", "mlflow=false")
MODELS = ("tiny", "tiny_av")
# Images and text; images and audio; many items a sample; equal shapes, on which every tie there can be is one.
WORKLOADS = ("chartqa", "synthetic_av", "nextqa", "uniform")
NODES = ("tiny", "a40x16")
VALID = "valid and within memory"
PARTS = ("planner", "assigner", "scheduler")
# Its parts take the place of a part beside those of this strategy.
PARTNER = "megatron"


@dataclass(frozen=True, slots=True)
class Case:
    """One check of one run; ``examine`` raises what is wrong."""

    check: str
    name: str
    examine: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out of a case: ``ok``, ``failed``, or ``skipped`` where the parts do not go with the run."""

    case: Case
    outcome: str
    detail: str
    seconds: float


def cases(composer: Composer, overrides: Sequence[str]) -> list[Case]:
    """Every check of the strategy that the overrides choose, on small runs; what they fix holds in all of these."""
    given = {text.lstrip("+").partition("=")[0] for text in overrides}

    def composed(**chosen: str) -> RunConfig:
        ours = [*SMALL, *(f"{group}={name}" for group, name in chosen.items())]
        return composer.run([*(text for text in ours if text.partition("=")[0] not in given), *overrides])

    def run(check: str, config: RunConfig, examine: Callable[[RunConfig], object], note: str = "") -> Case:
        name = f"{config.workload['name']}, {config.model['name']}, {config.cluster['name']}{note}"
        return Case(check, name, lambda: examine(config))

    settings = [composed(model=model, workload=name, cluster=NODES[0]) for model, name in product(MODELS, WORKLOADS)]
    nodes = [composed(model=MODELS[1], workload=workload, cluster=NODES[1]) for workload in WORKLOADS]
    partner = composer.run([text for text in SMALL if text not in given] + [f"strategy={PARTNER}"]).strategy
    found = [
        Case("imports what is open to strategies", "source", lambda: checks.require_walls(settings[0])),
        *(run(VALID, each, require_valid) for each in settings),
        *(run("repeatable, also with wrong estimates", each, checks.require_repeatable) for each in nodes),
        *(run("blind to the truth behind its estimates", each, checks.require_blind) for each in nodes),
        *(run("parts mix", mixed(nodes[0], partner, part), require_valid, f", {PARTNER}'s {part}") for part in PARTS),
    ]
    return list({(case.check, case.name): case for case in found}.values())


def mixed(config: RunConfig, partner: Any, part: str) -> RunConfig:
    """The run with one part of its strategy replaced."""
    return replace(config, strategy={**config.strategy, "name": "mixed", part: partner[part]})


def examine(each: Sequence[Case]) -> Iterator[Verdict]:
    """Verdicts, one by one."""
    for case in each:
        started = perf_counter()
        outcome, detail = "ok", ""
        try:
            case.examine()
        except IncompatibleError as error:
            outcome, detail = "skipped", str(error)
        except (ViolationError, UserError) as error:
            outcome, detail = "failed", str(error)
        except Exception as error:
            outcome, detail = "failed", explain(error)
        yield Verdict(case, outcome, detail, perf_counter() - started)
