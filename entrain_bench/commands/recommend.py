"""``entrain-bench recommend [KEY=VALUE ...]``: recommend a strategy for a job: plan, time, reasons, robustness."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from entrain_bench.answers.commands import command_line, quoted
from entrain_bench.answers.comparison import baseline_of
from entrain_bench.answers.console_table import describe_cell, make_console
from entrain_bench.answers.recommend import megatron
from entrain_bench.answers.recommend.megatron import FRAMEWORKS, flag_lines, refusal, variants_within
from entrain_bench.answers.recommend.recommendation import (
    KNOBS,
    STATED,
    Recommendation,
    answer_lines,
    no_result_lines,
    reason_of,
    recommend,
    summary_lines,
)
from entrain_bench.answers.recommend.strategy_race import Raced, Refuse, StrategyRace, race
from entrain_bench.answers.sentences import notices
from entrain_bench.answers.tracking.log import sweep_name
from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.watch import say
from entrain_bench.config.compose import Composer
from entrain_bench.config.given import check_of_job
from entrain_bench.config.grammar import RUN_KEYS, Request, Verb, own
from entrain_bench.config.hub.files import is_reference
from entrain_bench.config.overrides import parse, swept_keys
from entrain_bench.config.schema import ASIDE, RunConfig
from entrain_bench.program.plan_file import plan_text
from entrain_bench.records.keys import workload_of
from entrain_bench.records.records import Results
from entrain_bench.run.parallel import num_processes
from entrain_bench.run.study import Output, Study
from entrain_bench.specs.model import ModelSpec

EXIT_NO_RESULT = 2
FILE = "recommendation.yaml"
# The job of the README, and its answer: a block of code of so many letters a line.
README_JOB = ("model=qwen25vl_llama3_1b", "workload=opencqa_ocr", "cluster=a40x64")
README_TABLE = "tables/recommendation.md"
INDENT = "    "
README_WIDTH = 100
EVERY_STRATEGY = "strategy=glob(*)"
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

    within: str | None = own(None, f"only strategies that this framework runs unmodified: {', '.join(FRAMEWORKS)}")
    seconds: float | None = own(None, "start no seeds or draws after this many seconds, above 0; null: no limit")
    output: str | None = own(None, f"file of the plan; null: results_dir/{FILE}")

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.seconds is None or self.seconds > 0, "seconds", self.seconds, "above 0")
        if self.within is not None and self.within not in FRAMEWORKS:
            raise unknown_choice("within", self.within, FRAMEWORKS)


VERB = Verb(
    Keys,
    RUN_KEYS,
    examples=[
        "model=hf:Qwen/Qwen2.5-VL-7B-Instruct data=mine.parquet cluster=8xh100",
        "model=qwen25vl_llama3_3b workload=chartqa cluster=h100x64",
    ],
)


def main(request: Request[Keys]) -> int:
    """Recommend, and write the plan; returns 0, or 2 if no strategy has a result; ``UserError`` for bad input."""
    keys = request.keys
    composer = Composer(request.config_dir)
    asked = _asked(composer, request.overrides, keys.within is not None)
    config = asked.config
    results = Results(Path(config.results_dir))
    results.prepare()
    width = make_console().width
    path = Path(keys.output or results.root / FILE)
    runner, raced, answer = _answered(asked, results, composer, keys)
    composer.save()
    if answer:
        _print(answer_lines(answer, asked.omitted, width))
        if keys.within:
            _print(flag_lines(runner, answer, path, width))
        try:
            write_atomically(path, plan_text(answer.plan).encode())
        except OSError as error:
            raise UserError(f"output={path}: cannot be written to ({error.strerror})") from error
        command = command_line([f"plan={quoted(str(path))}"], request.config_dir)
        trains = "" if is_reference(config.model["name"]) else "; with harness=train on real ranks"
        say(f"written: {path} ({command} runs it{trains})")
    else:
        heading, *lines = _no_result(runner, raced)
        _print(lines)
        say(f"entrain-bench: {heading}")
    # These import what draws pictures, which would take seconds before the first run.
    from entrain_bench.commands.publish import log_to_mlflow, write_tables

    write_tables(results)
    records = [record for key in runner.keys if (record := results.read(key))]
    for line in notices(records):
        say(line)
    if config.mlflow:
        log_to_mlflow(results, records, sweep_name(["recommend", *request.overrides]), config.mlflow_uri)
    return 0 if answer else EXIT_NO_RESULT


def recommendation_output() -> Output:
    """Return the document with the README's recommendation; its race shares runs of the main figure."""
    return Output("recommendation", [("figure=iteration_time", *README_JOB)], write_recommendation)


def write_recommendation(study: Study) -> str:
    """Write ``tables/recommendation.md``, the short answer for ``README_JOB``; returns why there is none, if so."""
    asked = _asked(study.composer, README_JOB, within=False)
    runner, raced, answer = _answered(asked, study.results, study.composer, Keys())
    if answer is None:
        return _no_result(runner, raced)[0]
    lines = [f"{INDENT}{line}".rstrip() for line in summary_lines(answer, README_WIDTH)]
    write_atomically(study.results.root / README_TABLE, "\n".join([*lines, ""]).encode())
    return ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked question."""

    # The first strategy's run.
    config: RunConfig
    # Keys of the job; those that the tuner chooses are null unless given.
    overrides: Sequence[str]
    # Overrides of every strategy, in the order in which they start.
    variants: Mapping[str, Sequence[str]]
    baseline: str
    # The user's overrides by key.
    given: Mapping[str, str]
    # Strategies and values of keys that are not considered.
    omitted: Mapping[str, Any]


def _answered(
    asked: Asked, results: Results, composer: Composer, keys: Keys
) -> tuple[StrategyRace, Raced, Recommendation | None]:
    started = perf_counter()

    def clock() -> str:
        return f"[{perf_counter() - started:5.1f} s]"

    runner = StrategyRace(
        asked.overrides,
        asked.config.seed,
        asked.variants,
        results,
        composer,
        num_processes(),
        lambda record: say(describe_cell(clock(), record)),
    )
    refuse: Refuse = refusal if keys.within else lambda *_: ""
    raced = race(runner, [asked.baseline], refuse, keys.seconds)
    say(f"{clock()} judging the winner on fresh seeds")
    answer = recommend(
        runner,
        raced,
        asked.baseline,
        asked.given,
        composer.defaults,
        lambda: keys.seconds is None or perf_counter() - started < keys.seconds,
    )
    return runner, raced, answer


def _asked(composer: Composer, overrides: Sequence[str], within: bool) -> Asked:
    keys = _checked_keys(overrides)
    given = {**keys}
    chosen = keys.pop("strategy", EVERY_STRATEGY)
    keys |= {key: f"{key}=null" for key in KNOBS if key not in keys and composer.defaults[key] is not None}
    names, every = (
        [cell[0].partition("=")[2] for cell in composer.sweep([text]).cells] for text in (chosen, EVERY_STRATEGY)
    )
    config = composer.run([f"strategy={names[0]}", *keys.values()])
    model = ModelSpec.from_config(config.model)
    workload_of(config).source(model.tokens)
    for key, text in keys.items():
        if key not in (*STATED, "seed", *ASIDE):
            check_of_job("overrides", text)
    texts = [text for key, text in keys.items() if key not in ("seed", *ASIDE)]
    nodes = {name: composer.run([f"strategy={name}"]).strategy for name in dict.fromkeys([*names, *every])}
    considered = [name for name in nodes if name in names and (not within or megatron.KEY in nodes[name])]
    variants: dict[str, tuple[str, ...]] = {name: (f"strategy={name}",) for name in considered}
    if within:
        if not considered:
            raise UserError(f"{chosen}: {megatron.NAME} runs none of these strategies unmodified")
        texts += [text for text in megatron.OVERRIDES if text.partition("=")[0] not in keys]
        stated = {name: nodes[name][megatron.KEY] for name in considered}
        for name, needed in stated.items():
            require(isinstance(needed, list), f"strategy={name}: {megatron.KEY}", needed, "a list of overrides")
        variants = variants_within(stated, None if "layout.recompute" in keys else model)
    orders = {name: nodes[first.partition("=")[2]].get("display_order") for name, (first, *_) in variants.items()}
    omitted = {
        "strategies": sorted(nodes.keys() - {*considered}),
        "given": [given[key] for key in KNOBS if key in given and parse(given[key]).value() is not None],
    }
    return Asked(config, texts, variants, baseline_of(orders), given, omitted)


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
