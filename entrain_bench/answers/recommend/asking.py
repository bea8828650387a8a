"""A question as users ask it, by overrides and a few own keys, and all that answers it: race, plans, settings."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from entrain_bench.answers.answer import PLANS, job_name
from entrain_bench.answers.commands import command_line, quoted
from entrain_bench.answers.comparison import Times, with_result
from entrain_bench.answers.recommend.engines import (
    ENGINES,
    FRAMEWORK,
    LOOP,
    MEGATRON_LOOP,
    READERS,
    SUITE,
    Variant,
    program_of,
    refusal,
    variants_of,
)
from entrain_bench.answers.recommend.lines import no_result_lines
from entrain_bench.answers.recommend.recommendation import (
    KNOBS,
    NUM_FRESH,
    OTHERWISE,
    STATED,
    YOURS,
    Question,
    Recommendation,
    Reply,
    measured_step,
    reason_of,
    recommend,
    spent_s,
)
from entrain_bench.answers.recommend.script import launch_line, train_script
from entrain_bench.answers.recommend.settings import FRAMEWORKS, Settled, command_lines, megatron_flags
from entrain_bench.answers.recommend.strategy_race import ROUNDS, Raced, StrategyRace, race, settle
from entrain_bench.answers.statistics import mean_interval
from entrain_bench.answers.text import count, listing
from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.config.compose import Composer
from entrain_bench.config.given import check_of_job
from entrain_bench.config.grammar import own
from entrain_bench.config.hub.files import is_reference
from entrain_bench.config.overrides import parse, swept_keys
from entrain_bench.config.schema import ASIDE, RunConfig
from entrain_bench.program.plan_file import plan_text
from entrain_bench.records.keys import workload_of
from entrain_bench.records.records import Record, Results, labels_of
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import UNPADDED
from entrain_bench.specs.model import ModelSpec

PADDING_KEYS = ("padding", "pad_to_multiple_of")
EVERY_STRATEGY = "strategy=glob(*)"
# The strategy that rules of thumb make, and the one whose layout is the user's own.
RULES = "megatron_rigid"
ARRIVAL = "megatron"
# The key of a strategy's YAML: considered for this suite's runtime even if no strategy is named.
CONTENDS = "contends"
BEAT_S = 5.0
# A recommendation compares unmodified strategies in simulation and writes a plan.
REFUSED = {
    "plan": "is the output of recommend. To run a plan, use entrain-bench plan=FILE",
    "figure": "is not a key of a training job. Leave it out",
    "hydra": "is not a key of a training job. Leave it out",
    "harness": "must be simulate, because recommend compares simulations. Leave it out",
}
# Tells the user how far an answer is.
type Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Keys:
    """Own keys of a question."""

    within: str | None = own(None, f"only the answer for this framework, unmodified: {', '.join(FRAMEWORKS)}")
    measured_s: float | None = own(None, "your seconds per iteration, above 0, with layout... as you run it")
    seconds: float | None = own(None, "start no seeds or draws after this many seconds, above 0; null: no limit")
    output: str | None = own(None, f"folder of the plans and the answer; null: results_dir/{PLANS}")

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.seconds is None or self.seconds > 0, "seconds", self.seconds, "above 0")
        require(self.measured_s is None or self.measured_s > 0, "measured_s", self.measured_s, "above 0")
        if self.within is not None and self.within not in FRAMEWORKS:
            raise unknown_choice("within", self.within, FRAMEWORKS)


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked question; ``free`` and ``overrides`` are those of ``StrategyRace``."""

    keys: Keys
    config: RunConfig
    free: Sequence[str]
    overrides: Sequence[str]
    question: Question
    # Strategies and values of keys that are not considered.
    omitted: Mapping[str, Any]

    @classmethod
    def of(cls, composer: Composer, overrides: Sequence[str], own_keys: Keys) -> "Asked":
        """Read a question; ``UserError`` for overrides that are not of a job, and a framework that runs none of it."""
        keys = _checked_keys(overrides)
        given = {**keys}
        chosen = keys.pop("strategy", EVERY_STRATEGY)
        names, every = (
            [cell[0].partition("=")[2] for cell in composer.sweep([text]).cells] for text in (chosen, EVERY_STRATEGY)
        )
        free = [f"{key}=null" for key in KNOBS if composer.defaults[key] is not None]
        config = composer.run(
            [f"strategy={names[0]}", *({**{text.partition("=")[0]: text for text in free}, **keys}.values())]
        )
        model = ModelSpec.from_config(config.model)
        workload_of(config).source(model.tokens)
        for key, text in keys.items():
            if key not in (*STATED, "seed", *ASIDE):
                check_of_job("overrides", text)
        # With a measured time, the user's layout is that of the user's run; the answers are free.
        mine = [text for key, text in keys.items() if own_keys.measured_s and key in KNOBS]
        padding = tuple(text for key, text in keys.items() if key in PADDING_KEYS)
        apart = (*mine, *padding)
        texts = [text for key, text in keys.items() if key not in ("seed", *ASIDE) and text not in apart]
        nodes = {name: composer.run([f"strategy={name}"]).strategy for name in dict.fromkeys([*names, *every])}
        wanted = {name: nodes[name] for name in names}
        readers = (FRAMEWORK,) if own_keys.within else READERS
        engines = [FRAMEWORKS[own_keys.within].engine] if own_keys.within else [*ENGINES]
        within = own_keys.within and FRAMEWORKS[own_keys.within]
        divides = model.llm.config.experts is not None and (not within or within.divides)
        variants = variants_of(wanted, readers, engines, padding, divides=divides)
        if own_keys.within and (kinds := FRAMEWORKS[own_keys.within].shardings):
            variants = {name: able for name, one in variants.items() if (able := one.sharded_as(kinds)).attempts}
        if "strategy" not in given:
            # Strategies of a user state no family.
            variants = {
                name: one
                for name, one in variants.items()
                if one.engine or nodes[name].get(CONTENDS) or not nodes[name].get("family")
            }
        if not variants:
            assert own_keys.within
            raise UserError(f"{chosen}: {FRAMEWORKS[own_keys.within].name} runs none of these strategies unmodified")
        baseline = YOURS if own_keys.measured_s else OTHERWISE
        attempt = (f"strategy={ARRIVAL}" if own_keys.measured_s else f"strategy={RULES}", *apart)
        variants[baseline] = Variant("", "", [attempt])
        omitted = {
            "strategies": sorted(nodes.keys() - {one.attempts[0][0].partition("=")[2] for one in variants.values()}),
            "given": [text for text in texts if text.partition("=")[0] in KNOBS and parse(text).value() is not None],
        }
        question = Question(variants, baseline, given, composer.defaults)
        return cls(own_keys, config, free, texts, question, omitted)

    def answered(self, composer: Composer, results: Results, processes: int, say: Say) -> "Answered":
        """Race the variants, judge the fastest of each reader, and return the answer; tells ``say`` how far it is."""
        question = self.question
        progress = Progress(say)
        runner = StrategyRace(
            self.free,
            self.overrides,
            self.config.seed,
            {name: one.attempts[0] for name, one in question.variants.items()},
            results,
            composer,
            processes,
            progress.count,
        )
        ways = count(len(question.variants), "way", "ways")
        labels = labels_of(self.config)
        progress.say_now(f"{ways} to run {labels['model']} on {labels['cluster']}; planning each")

        def refuse(race: StrategyRace, name: str, seed: int) -> str:
            engine = question.variants[name].engine
            reason = refusal(race, engine, name, seed)
            within = self.keys.within and FRAMEWORKS[self.keys.within]
            if within and engine and not reason and not within.takes(engine, race.plan(name).layout):
                return f"{within.name} has no expert parallelism"
            return reason

        def has_time() -> bool:
            return self.keys.seconds is None or progress.seconds() < self.keys.seconds

        with progress.beating():
            refusals = settle(runner, {name: one.attempts for name, one in question.variants.items()}, refuse)
            fields = [question.field(reader) for reader in READERS]
            raced = race(runner, fields, [question.baseline], refusals, has_time, progress.round)
            progress.say_now(f"judging plans at {NUM_FRESH} fresh seeds")
            answer = recommend(question, runner, raced, has_time)
            if answer and self.keys.measured_s and with_result(raced.times[YOURS]):
                answer.values["measured"] = _measured(runner, self.keys.measured_s)
        return Answered(self, runner, raced, answer)


@dataclass(frozen=True, slots=True)
class Answered:
    """A question with its race and answer, if there is one."""

    asked: Asked
    runner: StrategyRace
    raced: Raced
    answer: Recommendation | None

    @property
    def reasons(self) -> list[str]:
        """Why no variant has a result, in lines; the first alone says that there is none."""
        return no_result_lines({name: reason_of(self.runner, self.raced, name) for name in self.raced.times})

    def files(self) -> "Files":
        """The files of the answer, named by the job of the question."""
        labels = labels_of(self.asked.config)
        folder = Path(self.asked.keys.output or self.runner.results.root / PLANS)
        return Files(folder, job_name([labels["model"], labels["workload"], labels["cluster"]]))

    def replies(self, files: "Files", config_dir: str | None) -> dict[str, Reply]:
        """Write the plan of every reader, and return the replies with their plan's file and the lines to type."""
        replies = dict[str, Reply]()
        for reader, one in self.answer.replies.items() if self.answer else ():
            path = files.write(f"-{reader}.yaml", plan_text(one.plan))
            settings = [*self._settings(one, path, config_dir)]
            script = None
            if reader == SUITE and is_reference(self.asked.config.model["name"]):
                cluster = ClusterSpec.from_config(self.asked.config.cluster)
                script = files.write("-train.py", train_script(one.plan, path, cluster))
                settings.append(f"{launch_line(cluster)} {script} DATASET")
            replies[reader] = replace(one, path=path, script=script, settings=settings)
        return replies

    def _settings(self, reply: Reply, path: Path, config_dir: str | None) -> Iterable[str]:
        """Yield the lines that a reader has to type."""
        command = command_line([f"plan={quoted(str(path))}"], config_dir)
        if reply.reader == SUITE:
            yield command if is_reference(self.asked.config.model["name"]) else f"{command} harness=train"
            return
        job, program = program_of(self.runner, reply.name, self.runner.first_seed)
        plan = reply.plan
        settled = Settled(job, plan.layout, plan.job.microbatch_size, float(program.shapes.unpadded.llm_tokens.mean()))
        able = {key: one for key, one in FRAMEWORKS.items() if one.takes(reply.engine, plan.layout)}
        if reply.engine == MEGATRON_LOOP:
            yield from command_lines([*megatron_flags(settled), "--dataloader-type external"])
        if reply.reader == LOOP:
            yield "from entrain_bench import BalancedBatchSampler"
            data = str(self.asked.config.workload.get("path", "mine.parquet"))
            yield f"sampler = BalancedBatchSampler.from_plan({data!r}, {str(path)!r}, counts='assigned')"
            yield "loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)"
            return
        chosen = self.asked.keys.within or next(iter(able))
        yield from able[chosen].spell(settled)
        if able[chosen].pads and job.framework.padding == UNPADDED:
            yield f"# Time of packed sequences; if your collator pads, add {able[chosen].pads}"
        others = [f"within={key} ({one.name})" for key, one in able.items() if key != chosen]
        if others:
            yield f"# {able[chosen].name}; the same for {listing(others)}"


@dataclass(slots=True)
class Progress:
    """How far the race is, as lines: now and then, and after each round."""

    say: Say
    started: float = field(default_factory=perf_counter)
    num_runs: int = 0

    def seconds(self) -> float:
        """Return the seconds so far."""
        return perf_counter() - self.started

    def count(self, _: Record) -> None:
        """Count a run."""
        self.num_runs += 1

    def say_now(self, text: str) -> None:
        """Say a line that begins with the time."""
        self.say(f"[{self.seconds():5.1f} s] {text}")

    def round(self, times: Mapping[str, Times], left: int) -> None:
        """Say who is ahead after a round."""
        means = {n: sum(own.values()) / len(own) for n, by_seed in times.items() if (own := with_result(by_seed))}
        best = min(means, key=lambda name: means[name]) if means else ""
        ahead = f"; ahead: {best}, {means[best]:.3f} s per iteration" if best else ""
        self.say_now(f"{left} of {len(times)} ways to run it stay in the race{ahead}")

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Say the number of runs now and then while the body runs, so that a long planning is not silent."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(BEAT_S):
                self.say_now(f"{count(self.num_runs, 'run')} done")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@dataclass(frozen=True, slots=True)
class Files:
    """Files of an answer, named by job; none is replaced by another content."""

    folder: Path
    job: str

    def write(self, suffix: str, text: str) -> Path:
        """Write to a new file, or to the one that has this text; returns it."""
        number = 1
        while True:
            path = self.folder / f"{self.job}{f'-{number}' if number > 1 else ''}{suffix}"
            try:
                if path.exists() and path.read_text() != text:
                    number += 1
                    continue
                write_atomically(path, text.encode())
            except OSError as error:
                raise UserError(f"output={self.folder}: cannot be written to ({error.strerror})") from error
            return path


def _measured(runner: StrategyRace, measured_s: float) -> dict[str, Any]:
    seeds = runner.seeds(ROUNDS[-1])
    records = [one for one in runner.records([YOURS], seeds) if one.status == "ok"]
    times = [one.metrics["iteration_time_s"] for one in records]
    return measured_step(measured_s, mean_interval(times), spent_s(records))


def _checked_keys(overrides: Sequence[str]) -> dict[str, str]:
    """Return the overrides by key; ``UserError`` for keys of no job, and several values."""
    swept = swept_keys(overrides)
    for (key, several), text in zip(swept.items(), overrides, strict=True):
        group = key.replace("/", ".").partition(".")[0]
        if group in REFUSED:
            raise UserError(f"{text}: {REFUSED[group]}")
        if group == "strategy" and key != "strategy":
            raise UserError(
                f"{text}: would change every strategy. Leave it out, or put your strategy in a YAML of --config-dir"
            )
        if several and key != "strategy":
            raise UserError(f"{text}: must be one value; only strategy takes several")
    return dict(zip(swept, overrides, strict=True))
