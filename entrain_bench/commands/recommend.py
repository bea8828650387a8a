"""``entrain-bench recommend [KEY=VALUE ...]``: how to train a job fastest, for three readers, with settings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from entrain_bench.answers.answer import PLANS, job_name
from entrain_bench.answers.commands import command_line, quoted
from entrain_bench.answers.comparison import Times, with_result
from entrain_bench.answers.console_table import make_console
from entrain_bench.answers.labels import MODEL_ERROR
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
from entrain_bench.answers.recommend.lines import answer_lines, no_result_lines, summary_lines
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
from entrain_bench.answers.sentences import notices
from entrain_bench.answers.statistics import mean_interval
from entrain_bench.answers.text import count, listing
from entrain_bench.answers.tracking.log import sweep_name
from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.watch import heartbeat, say
from entrain_bench.config.compose import Composer
from entrain_bench.config.given import check_of_job
from entrain_bench.config.grammar import RUN_KEYS, Request, Verb, own
from entrain_bench.config.hub.files import is_reference
from entrain_bench.config.overrides import parse, swept_keys
from entrain_bench.config.schema import ASIDE, RunConfig
from entrain_bench.program.plan_file import plan_text
from entrain_bench.records.keys import workload_of
from entrain_bench.records.records import Record, Results, labels_of
from entrain_bench.run.parallel import num_processes
from entrain_bench.run.study import Output, Study
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.model import ModelSpec

EXIT_NO_RESULT = 2
# The job of the README, and the line length of its answer, a block of code.
README_JOB = ("model=qwen25vl_llama3_1b", "workload=opencqa_ocr", "cluster=a40x64")
README_TABLE = "tables/recommendation.md"
INDENT = "    "
README_WIDTH = 100
EVERY_STRATEGY = "strategy=glob(*)"
# The strategy that rules of thumb make, and the one whose layout is the user's own.
RULES = "megatron_rigid"
ARRIVAL = "megatron"
# The key of a strategy's YAML: among the fastest of a job of the main figure.
CONTENDS = "contends"
BEAT_S = 5.0
# A recommendation compares unmodified strategies in simulation and writes a plan.
REFUSED = {
    "plan": "is the output of recommend. To run a plan, use entrain-bench plan=FILE",
    "figure": "is not a key of a training job. Leave it out",
    "hydra": "is not a key of a training job. Leave it out",
    "harness": "must be simulate, because recommend compares simulations. Leave it out",
}


@dataclass(frozen=True, slots=True)
class Keys:
    """Own keys."""

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


VERB = Verb(
    Keys,
    RUN_KEYS,
    examples=[
        "model=hf:Qwen/Qwen2.5-VL-7B-Instruct data=mine.parquet cluster=8xh100",
        "model=qwen25vl_7b workload=chartqa cluster=16xh100 measured_s=24 layout.tp=4 layout.dp=4 microbatch_size=1",
    ],
)


def main(request: Request[Keys]) -> int:
    """Recommend, and write plans; returns 0, or 2 if no strategy has a result; ``UserError`` for bad input."""
    keys = request.keys
    composer = Composer(request.config_dir)
    asked = _asked(composer, request.overrides, keys)
    results = Results(Path(asked.config.results_dir))
    results.prepare()
    width = make_console().width
    runner, raced, answer = _answered(asked, results, composer, keys)
    composer.save()
    if answer:
        files = Files.of(Path(keys.output or results.root / PLANS), asked)
        plans = {reader: files.write(f"-{reader}.yaml", plan_text(one.plan)) for reader, one in answer.replies.items()}
        settings = {
            reader: [*_settings(runner, one, plans[reader], keys, request.config_dir, asked.config)]
            for reader, one in answer.replies.items()
        }
        if SUITE in plans and is_reference(asked.config.model["name"]):
            cluster = ClusterSpec.from_config(asked.config.cluster)
            script = train_script(answer.replies[SUITE].plan, plans[SUITE], cluster)
            plans["script"] = files.write("-train.py", script)
            settings[SUITE].append(f"{launch_line(cluster)} {plans['script']} DATASET")
        lines = answer_lines(answer, {"settings": settings, "omitted": asked.omitted, "error": MODEL_ERROR}, width)
        _print(lines)
        plans["answer"] = files.write(".txt", "\n".join([*lines, ""]))
        say(f"written: {listing([str(path) for path in plans.values()])}")
    else:
        heading, *lines = _no_result(runner, raced)
        _print(lines)
        say(f"entrain-bench: {heading}")
    # These import plotting packages, which would take seconds before the first run.
    from entrain_bench.commands.publish import log_to_mlflow, write_tables

    write_tables(results)
    records = [record for key in runner.keys if (record := results.read(key))]
    for line in notices(records):
        say(line)
    if asked.config.mlflow:
        log_to_mlflow(results, records, sweep_name(["recommend", *request.overrides]), asked.config.mlflow_uri)
    return 0 if answer else EXIT_NO_RESULT


def recommendation_output() -> Output:
    """Return the document with the README's recommendation; its race shares runs of the main figure."""
    return Output("recommendation", [("figure=iteration_time", *README_JOB)], write_recommendation)


def write_recommendation(study: Study) -> str:
    """Write ``tables/recommendation.md``, the short answer for ``README_JOB``; returns why there is none, if so."""
    asked = _asked(study.composer, README_JOB, Keys())
    runner, raced, answer = _answered(asked, study.results, study.composer, Keys())
    if answer is None:
        return _no_result(runner, raced)[0]
    lines = [f"{INDENT}{line}".rstrip() for line in summary_lines(answer, README_WIDTH)]
    write_atomically(study.results.root / README_TABLE, "\n".join([*lines, ""]).encode())
    return ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked question; ``free`` and ``overrides`` are those of ``StrategyRace``."""

    config: RunConfig
    free: Sequence[str]
    overrides: Sequence[str]
    question: Question
    # Strategies and values of keys that are not considered.
    omitted: Mapping[str, Any]


@dataclass(slots=True)
class Progress:
    """How far the race is, as lines: now and then, and after each round."""

    started: float = field(default_factory=perf_counter)
    num_runs: int = 0

    def seconds(self) -> float:
        """Return the seconds so far."""
        return perf_counter() - self.started

    def count(self, _: Record) -> None:
        """Count a run."""
        self.num_runs += 1

    def line(self) -> str:
        """Return the line of now and then."""
        return f"[{self.seconds():5.1f} s] {count(self.num_runs, 'run')} done"

    def round(self, times: Mapping[str, Times], left: int) -> None:
        """Say who is ahead after a round."""
        means = {n: sum(own.values()) / len(own) for n, by_seed in times.items() if (own := with_result(by_seed))}
        best = min(means, key=lambda name: means[name]) if means else ""
        ahead = f"; ahead: {best}, {means[best]:.3f} s per iteration" if best else ""
        say(f"[{self.seconds():5.1f} s] {left} of {len(times)} ways to run it stay in the race{ahead}")


@dataclass(frozen=True, slots=True)
class Files:
    """Files of an answer, named by job; none is replaced by another content."""

    folder: Path
    job: str

    @classmethod
    def of(cls, folder: Path, asked: Asked) -> "Files":
        """Return the files of a question."""
        labels = labels_of(asked.config)
        return cls(folder, job_name([labels["model"], labels["workload"], labels["cluster"]]))

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


def _settings(
    runner: StrategyRace, reply: Reply, path: Path, keys: Keys, config_dir: str | None, config: RunConfig
) -> Iterable[str]:
    """Yield what a reader has to type."""
    command = command_line([f"plan={quoted(str(path))}"], config_dir)
    if reply.reader == SUITE:
        yield command if is_reference(config.model["name"]) else f"{command} harness=train"
        return
    job, program = program_of(runner, reply.name, runner.first_seed)
    plan = reply.plan
    settled = Settled(job, plan.layout, plan.job.microbatch_size, float(program.shapes.llm_tokens.mean()))
    able = {key: one for key, one in FRAMEWORKS.items() if one.takes(reply.engine, plan.layout)}
    if reply.engine == MEGATRON_LOOP:
        yield from command_lines([*megatron_flags(settled), "--dataloader-type external"])
    if reply.reader == LOOP:
        yield "from entrain_bench import BalancedBatchSampler"
        yield f"sampler = BalancedBatchSampler.from_plan('mine.parquet', '{path}', counts='assigned')"
        yield "loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)"
        return
    chosen = keys.within or next(iter(able))
    yield from able[chosen].spell(settled)
    others = [f"within={key} ({one.name})" for key, one in able.items() if key != chosen]
    if others:
        yield f"# {able[chosen].name}; the same for {listing(others)}"


def _answered(
    asked: Asked, results: Results, composer: Composer, keys: Keys
) -> tuple[StrategyRace, Raced, Recommendation | None]:
    question = asked.question
    progress = Progress()
    runner = StrategyRace(
        asked.free,
        asked.overrides,
        asked.config.seed,
        {name: one.attempts[0] for name, one in question.variants.items()},
        results,
        composer,
        num_processes(),
        progress.count,
    )
    ways = count(len(question.variants), "way", "ways")
    labels = labels_of(asked.config)
    say(f"[{progress.seconds():5.1f} s] {ways} to run {labels['model']} on {labels['cluster']}; planning each")

    def refuse(race: StrategyRace, name: str, seed: int) -> str:
        return refusal(race, question.variants[name].engine, name, seed)

    def has_time() -> bool:
        return keys.seconds is None or progress.seconds() < keys.seconds

    with heartbeat(progress.line, BEAT_S):
        refusals = settle(runner, {name: one.attempts for name, one in question.variants.items()}, refuse)
        fields = [question.field(reader) for reader in READERS]
        raced = race(runner, fields, [question.baseline], refusals, has_time, progress.round)
        say(f"[{progress.seconds():5.1f} s] judging plans at {NUM_FRESH} fresh seeds")
        answer = recommend(question, runner, raced, has_time)
        if answer and keys.measured_s and with_result(raced.times[YOURS]):
            answer.values["measured"] = _measured(runner, keys.measured_s)
    return runner, raced, answer


def _measured(runner: StrategyRace, measured_s: float) -> dict[str, Any]:
    seeds = runner.seeds(ROUNDS[-1])
    records = [one for one in runner.records([YOURS], seeds) if one.status == "ok"]
    times = [one.metrics["iteration_time_s"] for one in records]
    return measured_step(measured_s, mean_interval(times), spent_s(records))


def _asked(composer: Composer, overrides: Sequence[str], own_keys: Keys) -> Asked:
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
    texts = [text for key, text in keys.items() if key not in ("seed", *ASIDE) and text not in mine]
    nodes = {name: composer.run([f"strategy={name}"]).strategy for name in dict.fromkeys([*names, *every])}
    wanted = {name: nodes[name] for name in names}
    readers = (FRAMEWORK,) if own_keys.within else READERS
    engines = [FRAMEWORKS[own_keys.within].engine] if own_keys.within else [*ENGINES]
    fixes = "layout.recompute" in keys and not mine
    variants = variants_of(wanted, readers, engines, fixes, model)
    if own_keys.within and (kinds := FRAMEWORKS[own_keys.within].shardings):
        variants = {name: able for name, one in variants.items() if (able := one.sharded_as(kinds)).attempts}
    if "strategy" not in given:
        variants = {n: one for n, one in variants.items() if one.engine or _contends(nodes[n])}
    if not variants:
        assert own_keys.within
        raise UserError(f"{chosen}: {FRAMEWORKS[own_keys.within].name} runs none of these strategies unmodified")
    baseline = YOURS if own_keys.measured_s else OTHERWISE
    attempt = (f"strategy={ARRIVAL}", *mine) if own_keys.measured_s else (f"strategy={RULES}",)
    variants[baseline] = Variant("", "", [attempt])
    omitted = {
        "strategies": sorted(nodes.keys() - {one.attempts[0][0].partition("=")[2] for one in variants.values()}),
        "given": [text for text in texts if text.partition("=")[0] in KNOBS and parse(text).value() is not None],
    }
    question = Question(variants, baseline, given, composer.defaults)
    return Asked(config, free, texts, question, omitted)


def _contends(node: Mapping[str, Any]) -> bool:
    """Whether a strategy is considered unless others are named; those of a user are."""
    return bool(node.get(CONTENDS)) or not node.get("family")


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


def _no_result(runner: StrategyRace, raced: Raced) -> list[str]:
    return no_result_lines({name: reason_of(runner, raced, name) for name in raced.times})


def _print(lines: Iterable[str]) -> None:
    console = make_console()
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
