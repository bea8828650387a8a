"""The conformance suite: checks of every strategy, their runs, and the modules that strategies may import."""

import ast
import importlib
import os
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
from math import isfinite
from time import perf_counter
from traceback import walk_tb

import numpy as np

from entrain_bench.balancing.estimates import LayerProfile, ProfiledSamples, UnitEstimates
from entrain_bench.balancing.profile import Profile, ProgramTimes, create_profile
from entrain_bench.base import errors
from entrain_bench.base.errors import OWN_PACKAGES, TRACEBACK_VARIABLE, IncompatibleError, UserError, explain
from entrain_bench.config.compose import Composer
from entrain_bench.config.schema import RunConfig
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.records.code import absolute, import_statements, sources_of
from entrain_bench.records.metrics import RunResult
from entrain_bench.records.records import METRICS
from entrain_bench.records.time_shares import TIME_SHARES
from entrain_bench.run.experiment import Feed, prepare, run_experiment
from entrain_bench.specs.cluster import ClusterSpec

SMALL = ("global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2", "iterations=1", "mlflow=false")
MODELS = ("tiny", "tiny_av")
# Images and text; images and audio; many items per sample; equal shapes, where all estimates tie.
WORKLOADS = ("chartqa", "synthetic_av", "nextqa", "uniform")
NODES = ("tiny", "a40x16")
VALID = "valid and within memory"
PARTS = ("planner", "assigner", "scheduler")
PARTNER = "megatron"  # strategy whose parts replace one part of the tested strategy
WRONG_BELIEF = 0.2  # estimation error in the check with wrong estimates
WATCHED_ITERATIONS = 3  # iterations in which decisions are compared; an observer has learned by then
SHARES_TOLERANCE = 1e-9  # rounding of shares that are 1 together
# Factors on hidden constants; sizes, memory, the datasheet's peak and the host link are public.
OTHER_TRUTH = {
    "gemm_efficiency": 0.6,
    "attention_forward_efficiency": 0.9,
    "attention_backward_efficiency": 0.4,
    "memory_bandwidth_bytes_per_s": 0.5,
    "memory_efficiency": 0.7,
    "kernel_launch_s": 7.0,
    "sustained_fraction": 0.8,
    "gemm_half_flops": 3.0,
    "attention_half_tokens": 0.2,
    "attention_half_head_dim": 2.0,
    "gemm_half_width": 3.0,
    "elementwise_efficiency": 0.5,
    "overlap_cost": 0.2,
    "host_launch_s": 2.0,
}
OTHER_LINKS = {"bandwidth_bytes_per_s": 0.3, "latency_s": 5.0, "collective_efficiency": 0.6, "collective_start_s": 3.0}


class ViolationError(Exception):
    """A strategy breaks a rule of the suite; the message names it."""


@dataclass(frozen=True, slots=True)
class ConformanceTest:
    """One check of one run; ``examine`` raises ``ViolationError``."""

    check: str
    name: str
    examine: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a case: ``ok``, ``failed``, or ``skipped`` if the strategy does not support the run.

    ``cause`` is the same for errors of one type that the same line raised.
    """

    case: ConformanceTest
    outcome: str
    detail: str
    seconds: float
    cause: str = ""


def cases(composer: Composer, overrides: Sequence[str]) -> list[ConformanceTest]:
    """Return all tests of the chosen strategy on small runs; the given overrides hold in every run."""
    given = {text.lstrip("+").partition("=")[0] for text in overrides}

    def composed(**chosen: str) -> RunConfig:
        ours = [*SMALL, *(f"{group}={name}" for group, name in chosen.items())]
        return composer.run([*(text for text in ours if text.partition("=")[0] not in given), *overrides])

    def run(check: str, config: RunConfig, examine: Callable[[RunConfig], object], note: str = "") -> ConformanceTest:
        name = f"{config.workload['name']}, {config.model['name']}, {config.cluster['name']}{note}"
        return ConformanceTest(check, name, lambda: examine(config))

    settings = [composed(model=model, workload=name, cluster=NODES[0]) for model, name in product(MODELS, WORKLOADS)]
    nodes = [composed(model=MODELS[1], workload=workload, cluster=NODES[1]) for workload in WORKLOADS]
    partner = composer.run([text for text in SMALL if text not in given] + [f"strategy={PARTNER}"]).strategy
    tests = [
        ConformanceTest("imports only open modules", "source", lambda: require_walls(settings[0])),
        *(run(VALID, config, require_valid) for config in settings),
        *(run("repeatable, also with wrong estimates", config, require_repeatable) for config in nodes),
        *(run("blind to the hidden cost model", config, require_blind) for config in nodes),
    ]
    for part in PARTS:
        mixed = replace(nodes[0], strategy={**nodes[0].strategy, "name": "mixed", part: partner[part]})
        tests.append(run("parts mix", mixed, require_valid, f", {PARTNER}'s {part}"))
    return list({(case.check, case.name): case for case in tests}.values())


def examine(tests: Sequence[ConformanceTest]) -> Iterator[Verdict]:
    """Run the tests and yield their verdicts."""
    for case in tests:
        started = perf_counter()
        outcome = "ok"
        detail = cause = ""
        try:
            case.examine()
        except Exception as error:
            outcome = "skipped" if isinstance(error, IncompatibleError) else "failed"
            detail = str(error) if isinstance(error, ViolationError | UserError) else explain(error)
            cause = f"{outcome} {type(error).__name__} {_raised_at(error)}"
            if os.environ.get(TRACEBACK_VARIABLE):
                traceback.print_exception(error)
        yield Verdict(case, outcome, detail, perf_counter() - started, cause)


def _raised_at(error: Exception) -> str:
    """File and line that raised an error; those that called a function of ``base.errors`` which did."""
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    file, line = next(place for place in reversed(places) if place[0] != errors.__file__)
    return f"{file}:{line}"


def require_walls(config: RunConfig) -> None:
    """Check that a strategy's modules import only open modules; ``ViolationError`` names files and lines."""
    strategy = prepare(config).strategy
    modules = {type(part).__module__ for part in (strategy.planner, strategy.assigner, strategy.scheduler)}
    if lines := trespasses(modules):
        raise ViolationError("; ".join(lines))


def require_valid(config: RunConfig) -> RunResult:
    """Check for a valid program within memory, all metrics, and no time below the bound; ``ViolationError`` if not."""
    outcome = run_experiment(config)
    metrics = outcome.metrics
    wrong = [name for name in METRICS if name not in metrics or not isfinite(metrics[name])]
    shares = ((name, -SHARES_TOLERANCE, 1.0) for name in ("bubble_ratio", *TIME_SHARES))
    for name, least, most in (("gap_to_lower_bound", 0.0, np.inf), *shares):
        wrong += [f"{name}={metrics[name]}"] if name not in wrong and not least <= metrics[name] < most else []
    if not wrong and abs(sum(metrics[name] for name in TIME_SHARES) - 1.0) > SHARES_TOLERANCE:
        wrong.append("time_*_share, which are not 1 together")
    if wrong:
        raise ViolationError(f"invalid metric values: {', '.join(wrong)}")
    return outcome


def require_repeatable(config: RunConfig) -> None:
    """Check that two runs of a seed have equal timelines, and that wrong estimates give a valid program."""
    first = require_valid(config)
    again = require_valid(config)
    # Throughput may hold the wall time of an assignment slower than these tiny iterations; the timeline may not.
    if first.timeline is None or again.timeline is None or not first.timeline.equals(again.timeline):
        raise ViolationError("two runs of one seed have different timelines")
    require_valid(replace(config, belief_error=WRONG_BELIEF))


def require_blind(config: RunConfig) -> None:
    """Decisions do not depend on the hidden cost model; ``ViolationError`` names the first that does."""
    config = replace(config, belief_error=WRONG_BELIEF)
    names = ["layout", *(f"program of iteration {i}" for i in range(WATCHED_ITERATIONS))]
    for name, here, there in zip(names, decisions(config), decisions(config, elsewhere), strict=True):
        if changed := difference(here, there):
            raise ViolationError(f"the {name} depends on the hidden cost model ({changed})")


def decisions(
    config: RunConfig, seen: Callable[[ClusterSpec], ClusterSpec] = lambda cluster: cluster
) -> list[Layout | Program]:
    """Return layout and programs of the first iterations, each executed before the next; observers see ``seen``."""
    setting = prepare(config)
    assert not setting.executor.trains
    job = replace(setting.job, cluster=seen(setting.job.cluster))
    known = (job, setting.truth, setting.source)
    wrong = (config.belief_error, config.belief_bias)
    profile = create_profile(*known, config.seed, *wrong)
    layout = setting.strategy.plan(create_profile(*known, config.planning_seed, *wrong, config.simulated_batches))
    feed = Feed(replace(setting, profile=profile), layout, config.seed)
    made = list[Layout | Program]([layout])
    for iteration in range(WATCHED_ITERATIONS):
        program, _ = feed.program(feed.batch(iteration))
        feed.observe(setting.executor.execute(program))
        made.append(program)
    return made


def elsewhere(cluster: ClusterSpec) -> ClusterSpec:
    """Return a cluster with the same public data and other hidden constants."""
    device = replace(cluster.device, **{name: getattr(cluster.device, name) * by for name, by in OTHER_TRUTH.items()})
    tiers = [
        replace(tier, **{name: getattr(tier, name) * by for name, by in OTHER_LINKS.items()}) for tier in cluster.tiers
    ]
    return replace(cluster, device=device, tiers=tuple(tiers))


def difference(one: object, other: object, path: str = "") -> str:
    """Return the first difference of two values of dataclasses, tuples and arrays; empty if they are equal."""
    if type(one) is not type(other):
        return path or type(one).__name__
    if isinstance(one, np.ndarray):
        return "" if np.array_equal(one, np.asarray(other)) else path
    parts = _parts(one)
    others = _parts(other)
    if not parts and not others:
        return "" if one == other else path
    if parts.keys() != others.keys():
        return path
    differences = (difference(part, others[name], f"{path}.{name}".lstrip(".")) for name, part in parts.items())
    return next(filter(None, differences), "")


def _parts(value: object) -> dict[str, object]:
    """Parts of a value by name; none if it is plain."""
    if isinstance(value, tuple | list):
        return {str(index): part for index, part in enumerate(value)}
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value) if not field.name.startswith("_")}
    return {}


STRATEGIES = "entrain_bench_strategies"
# Rooms of the suite that a strategy may import from. The others contain the cost model, the simulator and results.
OPEN_ROOMS = frozenset({"balancing", "base", "program", "specs"})
# Modules of open rooms that are closed: they write and keep files.
CLOSED_MODULES = frozenset({"base.files", "base.store"})
# Fields of a profile and its views that strategies may not read.
HIDDEN = frozenset(
    field.name
    for view in (Profile, ProfiledSamples, LayerProfile, UnitEstimates, ProgramTimes)
    for field in fields(view)
    if field.name.startswith("_")
)


def trespasses(modules: Collection[str]) -> list[str]:
    """Return the lines that use closed code in these modules and in the author's modules that they import."""
    lines = []
    for module, source in sorted(sources_of(modules).items()):
        if source.path is None or module.partition(".")[0] in OWN_PACKAGES - {STRATEGIES}:
            continue
        package = module if source.path.name == "__init__.py" else module.rpartition(".")[0]
        tree = ast.parse(source.path.read_bytes())
        trespassed = []
        for statement in import_statements(tree):
            trespassed += [(statement.lineno, f"imports {name}") for name in _closed(statement, package)]
        hidden = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in HIDDEN)
        for node in hidden:
            if getattr(node.value, "id", "") not in ("self", "cls"):
                trespassed.append((node.lineno, f"reads {ast.unparse(node)}"))
        lines += [f"{source.path}:{line}: {what}" for line, what in sorted(trespassed)]
    return lines


def _closed(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    """Yield imports of this suite that are closed to strategies, by where they are defined."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _is_ours(alias.name) and not _is_open(alias.name))
        return
    base = absolute("." * node.level + (node.module or ""), package)
    if not _is_ours(base):
        return
    for alias in node.names:
        home = _home(base, alias.name)
        if not _is_open(home):
            yield f"{home}.{alias.name}" if home == base else home


def _home(module: str, name: str) -> str:
    """Return the module that defines a name imported from a module."""
    try:
        value = getattr(importlib.import_module(module), name, None)
        if value is None:
            return importlib.import_module(f"{module}.{name}").__name__
    except ImportError:
        return module
    home = getattr(value, "__module__", None) or getattr(value, "__name__", None)
    return home if isinstance(home, str) and _is_ours(home) else module


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in OWN_PACKAGES - {STRATEGIES}


def _is_open(module: str) -> bool:
    top, _, rest = module.partition(".")
    return top == "entrain_bench" and rest.partition(".")[0] in OPEN_ROOMS and rest not in CLOSED_MODULES
