"""Where a strategy runs outside of this suite: engines that frameworks share, their limits, and the frameworks.

An engine is a way to execute an iteration: Megatron-LM's pipelines, or one copy of the model per rank with ZeRO or
FSDP. A strategy's YAML names its engines under ``switch_on``, with the overrides that it needs there. The two engines
named ``*loop`` need a sampler of the user's. Every plan and program is checked before it counts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from entrain_bench.answers.labels import MEGATRON_JOB, REPLICATED_JOB, SWITCH_ON
from entrain_bench.answers.recommend import megatron
from entrain_bench.answers.recommend.strategy_race import StrategyRace
from entrain_bench.base.errors import require, unknown_choice
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import Job
from entrain_bench.specs.sharding import ZERO1, ZERO2, ZERO3

SHARDING = "layout.sharding"
# Readers, each with an answer of its own: keep their framework, change their loader, change their runtime.
FRAMEWORK, LOOP, SUITE = READERS = "framework", "loop", "suite"
DEEPSPEED = (ZERO1, ZERO2)
# End of the names of variants whose ranks divide experts, which not every framework with FSDP can do.
WITH_EP = " with EP"
type Overrides = tuple[str, ...]
# Overrides to try in turn until one of them gives a result.
type Attempts = Sequence[Overrides]
# Why an engine does not run a program; nothing if it does.
type Reasons = Callable[[Job, Program], Iterator[str]]


def _sharded(*kinds: str) -> Attempts:
    """Every rank has all experts."""
    return [(f"{SHARDING}={kind}", "layout.ep=1") for kind in kinds]


def _layout_reasons(job: Job, layout: Layout) -> Iterator[str]:
    """Yield why a loop with one copy of the model on every rank cannot take a layout."""
    for placed in layout.modules:
        if placed.tp * placed.cp > 1 or placed.widths:
            yield f"{placed.module} has TP {placed.tp}, CP {placed.cp}; every rank must hold the whole model"
        if placed.ep > 1 and placed.sharding != ZERO3:
            yield f"{placed.module} has EP {placed.ep} without {SHARDING}={ZERO3}"
        if placed.sharding not in (*DEEPSPEED, ZERO3) or placed.offload:
            yield f"{placed.module} is {'offloaded' if placed.offload else f'sharded as {placed.sharding}'}"
    if not layout.is_one_stage or len({placed.dp for placed in layout.modules}) > 1:
        yield "every rank must hold the whole model"
    if len({(placed.recompute, placed.sharding) for placed in layout.modules}) > 1:
        yield "one switch recomputes and shards all modules"
    if job.model.generators:
        yield f"has no place for a generator ({job.model.generators[0].name})"


def _in_order(reasons: Reasons) -> Reasons:
    """As some reasons, for loops that take samples in order of arrival."""

    def both(job: Job, program: Program) -> Iterator[str]:
        yield from reasons(job, program)
        if not megatron.takes_arrivals(job, program):
            yield "its microbatches are not in order of arrival"

    return both


def _equal(job: Job, program: Program) -> Iterator[str]:
    """Yield why a loop that runs the whole model on microbatches of one size would not run a program so."""
    yield from megatron.shape_reasons(job, program)
    yield from megatron.size_reasons(job, program)


@dataclass(frozen=True, slots=True)
class Engine:
    """A way to execute an iteration that frameworks share.

    Attributes:
        label: end of the names of its variants.
        reader: whose answer it belongs to.
        overrides: settings of the job in it.
        attempts: by suffix of a name, overrides to try in turn.
        layout_reasons, program_reasons: why it does not run a layout or a program.
    """

    label: str
    reader: str
    overrides: Overrides
    attempts: Mapping[str, Attempts]
    layout_reasons: Callable[[Job, Layout], Iterator[str]]
    program_reasons: Reasons


MEGATRON = "megatron"
SHARDED = "sharded"
MEGATRON_LOOP = "megatron_loop"
ENGINES = {
    MEGATRON: Engine(
        " in Megatron-LM",
        FRAMEWORK,
        MEGATRON_JOB,
        {"": [()]},
        megatron.layout_reasons,
        _in_order(megatron.program_reasons),
    ),
    SHARDED: Engine(
        "",
        FRAMEWORK,
        REPLICATED_JOB,
        # ZeRO-3 by FSDP, also with EP, and ZeRO-1 by DeepSpeed; ZeRO-2 if ZeRO-1 does not fit.
        {
            " by DeepSpeed": _sharded(*DEEPSPEED),
            " in HF Trainer": _sharded(ZERO3),
            WITH_EP: [(f"{SHARDING}={ZERO3}",)],
        },
        _layout_reasons,
        _in_order(_equal),
    ),
    "loop": Engine(
        " in your loop", LOOP, REPLICATED_JOB, {"": _sharded(ZERO1)}, _layout_reasons, megatron.shape_reasons
    ),
    MEGATRON_LOOP: Engine(
        " by Megatron-LM's external loader",
        LOOP,
        MEGATRON_JOB,
        {"": [()]},
        megatron.layout_reasons,
        megatron.program_reasons,
    ),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy as a reader can run it; in this suite without an engine. ``attempts`` are tried in turn."""

    reader: str
    engine: str
    attempts: Attempts

    def sharded_as(self, kinds: Sequence[str]) -> "Variant":
        """Return the variant with only those attempts that shard as a framework does."""
        texts = {f"{SHARDING}={kind}" for kind in kinds}
        return replace(self, attempts=[one for one in self.attempts if texts & {*one}])


def variants_of(
    names: Mapping[str, Mapping[str, object]],
    readers: Sequence[str],
    engines: Sequence[str],
    padding: Overrides = (),
    *,
    divides: bool = False,
) -> dict[str, Variant]:
    """Return the variants that readers can run, by name; ``names`` has the YAML of strategies.

    ``padding``: that of the user's framework; this suite packs. ``divides``: frameworks may divide the model's experts.
    ``UserError`` for an engine that is not known.
    """
    found = {}
    for name, node in names.items():
        switches = node.get(SWITCH_ON) or {}
        require(isinstance(switches, Mapping), f"strategy={name}: {SWITCH_ON}", switches, "a mapping of lists")
        assert isinstance(switches, Mapping)
        for key, needed in switches.items():
            if key not in ENGINES:
                raise unknown_choice(f"strategy={name}: {SWITCH_ON}", key, [*ENGINES])
            require(isinstance(needed, list), f"strategy={name}: {SWITCH_ON}.{key}", needed, "a list of overrides")
            engine = ENGINES[key]
            if engine.reader not in readers or key not in engines:
                continue
            for suffix, attempts in engine.attempts.items():
                if suffix == WITH_EP and not divides:
                    continue
                common = (f"strategy={name}", *engine.overrides, *needed, *padding)
                tried = [(*common, *one) for one in attempts]
                found[f"{name}{engine.label}{suffix}"] = Variant(engine.reader, key, tried)
        if SUITE in readers:
            found[name] = Variant(SUITE, "", [(f"strategy={name}",)])
    return found


def refusal(runner: StrategyRace, engine: str, name: str, seed: int) -> str:
    """Why an engine does not run a strategy's plan at a seed; empty if it does, and without an engine."""
    if not engine:
        return ""
    job = prepare(runner.config(name, seed)).job
    reasons = next(ENGINES[engine].layout_reasons(job, runner.plan(name).layout), "")
    return reasons or next(ENGINES[engine].program_reasons(*program_of(runner, name, seed)), "")


def program_of(runner: StrategyRace, name: str, seed: int) -> tuple[Job, Program]:
    """The job of a variant, and its program for the first batch of a seed."""
    config = runner.config(name, seed)
    setting = prepare(config)
    shapes = setting.source.batch(0, config.global_batch, seed)
    return setting.job, setting.strategy.program(shapes, runner.plan(name).layout, setting.profile)
