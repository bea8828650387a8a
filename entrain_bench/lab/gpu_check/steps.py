"""The steps of the check: each looks at one thing, and ends with a verdict whatever the others found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree as ET

from entrain_bench.costs.profiled.cluster import fitted_link
from entrain_bench.costs.profiled.file import read_profile
from entrain_bench.lab.fidelity.compare import TARGET_ITERATION, TARGET_SPEEDUP
from entrain_bench.lab.gpu_check.cells import Runs, layout_of, metrics_of, problem_of, series
from entrain_bench.lab.gpu_check.machine import Machine
from entrain_bench.lab.gpu_check.processes import last_line, run_python
from entrain_bench.lab.gpu_check.result import (
    FAILED,
    PASSED,
    SKIPPED,
    TOLERANCES,
    Finding,
    Rows,
    judge_losses,
    speedup_rows,
    timing_row,
)
from entrain_bench.lab.gpu_check.settings import (
    CORRECTNESS,
    CORRECTNESS_S,
    PREDICTION_S,
    PROFILE_S,
    PROGRAM_S,
    REFERENCE,
    TESTS_S,
    Plan,
    Setup,
)
from entrain_bench.records.records import Record

# Characters of what a test has to say that a table shows.
LONGEST = 200
# Columns of the table of throughput, by metric; memory in GiB.
THROUGHPUT = {
    "s/iteration": "iteration_time_s",
    "samples/s": "samples_per_s",
    "TFLOPS/GPU": "tflops_per_gpu",
    "MFU": "mfu",
    "peak GiB": "peak_memory_bytes",
}
SCALE = {"peak GiB": 2.0**-30}


@dataclass(frozen=True, slots=True)
class Check:
    """What steps look at.

    Attributes:
        machine: what there is.
        setup: what is run on which of it.
        tests: folder of the suite's tests; those marked ``gpu`` are run.
        say: tells the user what is being done.
    """

    machine: Machine
    setup: Setup
    tests: Path
    say: Callable[[str], None]

    def runs(self, step: str) -> Runs:
        """Where the runs of a step leave what they leave."""
        return Runs(self.setup.runs / step, self.setup)

    @property
    def gpu_tests(self) -> list[Path]:
        """Files with tests marked ``gpu``."""
        return sorted(path for path in self.tests.rglob("test_*.py") if "mark.gpu" in path.read_text())


def environment(check: Check) -> Finding:
    """What there is, and whether torch sees the GPUs that the driver lists."""
    machine = check.machine
    tables = {
        "GPUs": machine.gpus,
        "System": [{"what": name, "value": value} for name, value in (machine.system | machine.packages).items()],
        "Variables": [{"variable": name, "value": value} for name, value in machine.variables.items()],
    }
    text = {"nvidia-smi": machine.nvidia_smi, "nvidia-smi topo -m": machine.topology}
    found = f"{len(machine.gpus)} GPUs ({machine.gpus[0]['name']})" if machine.gpus else "no GPU"
    if machine.listed > len(machine.gpus) and "CUDA_VISIBLE_DEVICES" not in machine.variables:
        return Finding(FAILED, f"the driver lists {machine.listed} GPUs, torch sees {len(machine.gpus)}", tables, text)
    used = f"{check.setup.num_devices} {'GPUs' if check.setup.on_gpu else 'ranks over gloo on the CPU'}"
    return Finding(PASSED, f"{found}; checked with {used}", tables, text)


def gpu_tests(check: Check) -> Finding:
    """The tests marked ``gpu``."""
    files = check.gpu_tests
    if not files:
        return Finding(SKIPPED, f"no tests marked gpu in {check.tests}: they come with the source, not with a wheel")
    log, report = check.setup.folder / "tests.log", check.setup.folder / "junit.xml"
    report.unlink(missing_ok=True)
    options = ["-m", "gpu", "-n", "0", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    arguments = ["-m", "pytest", *map(str, files), *options]
    wrong = run_python(arguments, log, TESTS_S, check.setup.environment)
    if not report.exists():
        return Finding(FAILED, f"{wrong} ({last_line(log)})")
    return judge_tests(report, wrong)


def judge_tests(report: Path, wrong: str) -> Finding:
    """What a JUnit report says.

    Args:
        report: the file.
        wrong: what was wrong with the process that wrote it; empty for nothing.
    """
    rows: Rows = []
    for case in ET.parse(report).iter("testcase"):  # noqa: S314
        bad = [child for child in case if child.tag in ("failure", "error")]
        verdict = FAILED if bad else SKIPPED if case.find("skipped") is not None else PASSED
        said = [child.get("message") or "" for child in bad or list(case)]
        row = {"test": case.get("name"), "verdict": verdict, "seconds": float(case.get("time") or 0)}
        rows.append(row | {"reason": " ".join("".join(said[:1]).split())[:LONGEST]})
    count = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in (PASSED, FAILED, SKIPPED)}
    line = ", ".join(f"{number} {verdict}" for verdict, number in count.items() if number) or "no tests"
    if count[FAILED] or wrong:
        return Finding(FAILED, f"{line}{f' ({wrong})' if wrong and not count[FAILED] else ''}", {"Tests": rows})
    if not count[PASSED]:
        reason = next((str(row["reason"]) for row in rows if row["reason"]), "none was run")
        return Finding(SKIPPED, f"{line}: {reason}", {"Tests": rows})
    return Finding(PASSED, line, {"Tests": rows})


def correctness(check: Check) -> Finding:
    """Every strategy's losses beside those of one device."""
    tables: dict[str, Rows] = {}
    dtypes = ["float32", "bfloat16"] if check.setup.on_gpu else ["float32"]
    for dtype in dtypes:
        tables[f"Losses in {dtype}"] = _losses(check, dtype)
    rows = [row for table in tables.values() for row in table]
    return judge_correctness(tables, rows, len(dtypes))


def judge_correctness(tables: dict[str, Rows], rows: Rows, num_types: int) -> Finding:
    """The verdict on all runs; those that no layout was found for are left out."""
    wrong = [str(row["strategy"]) for row in rows if row["verdict"] == FAILED]
    good, left_out = (sum(row["verdict"] == verdict for row in rows) for verdict in (PASSED, SKIPPED))
    fit = f"; {left_out} do not fit so many devices" if left_out else ""
    tolerances = ", ".join(f"{TOLERANCES[name]:g} in {name}" for name in [*TOLERANCES][:num_types])
    if wrong or not good:
        return Finding(FAILED, f"{good} of {len(rows) - left_out} runs equal; not: {', '.join(wrong)}{fit}", tables)
    return Finding(PASSED, f"{good} runs have one device's losses (to {tolerances}){fit}", tables)


def _losses(check: Check, dtype: str) -> Rows:
    setup, runs = check.setup, check.runs(f"correctness_{dtype}")
    job, given = [*CORRECTNESS, *setup.unprofiled(setup.num_devices)], f"harness.dtype={dtype}"
    alone = [*CORRECTNESS, *setup.unprofiled(1), given]
    check.say(f"losses of one device in {dtype}")
    record = runs.train("one_device", REFERENCE, alone, 1, CORRECTNESS_S)
    reference = series(record, "loss") if isinstance(record, Record) else []
    if not reference:
        return [{"strategy": f"{REFERENCE} on one device", "verdict": FAILED, "reason": problem_of(record)}]
    strategies = setup.strategies()
    check.say(f"plans of {len(strategies)} strategies")
    planned = runs.predict(job, strategies, PREDICTION_S)
    rows: Rows = []
    for number, name in enumerate(strategies, start=1):
        plan = planned[name]
        if reason := problem_of(plan):
            rows.append({"strategy": name, "verdict": verdict_without(plan), "reason": reason})
            continue
        check.say(f"losses of {name} in {dtype} ({number} of {len(strategies)})")
        done = runs.train(name, name, [*job, given], setup.num_devices, CORRECTNESS_S)
        if isinstance(done, str) or problem_of(done):
            rows.append({"strategy": name, "verdict": FAILED, "reason": problem_of(done)})
            continue
        (row,) = judge_losses({name: series(done, "loss")}, reference, TOLERANCES[dtype])
        rows.append(row | {"layout": layout_of(done)})
    return rows


def verdict_without(prediction: Record | str) -> str:
    """The verdict on a program without a prediction: skipped if it does not fit, failed for any other reason."""
    return SKIPPED if isinstance(prediction, Record) and prediction.finished else FAILED


def profile(check: Check) -> Finding:
    """Times of layers, optimizer and communication, for the predictions of the next steps."""
    setup = check.setup
    log = setup.folder / "profile.log"
    log.unlink(missing_ok=True)
    check.say("profile of layers and communication")
    wrong = run_python(["-m", "entrain_bench.cli", "profile", *setup.profiling()], log, PROFILE_S, setup.environment)
    if wrong:
        return Finding(FAILED, f"{wrong} ({last_line(log)}); a second call goes on")
    found = read_profile(setup.profile, str(setup.profile))
    constants = found.constants
    rows = [
        {"what": "fastest product", "value": f"{constants.peak_bf16_flops / 1e12:.4g} TFLOP/s"},
        {"what": "memory bandwidth", "value": f"{constants.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s"},
        {"what": "to the host", "value": f"{constants.host_bandwidth_bytes_per_s / 1e9:.4g} GB/s"},
    ]
    if found.collectives:
        link = fitted_link(found.collectives, "collectives")
        rate, latency_us = link["bandwidth_bytes_per_s"] / 1e9, 1e6 * link["latency_s"]
        rows.append({"what": "links", "value": f"{rate:.3g} GB/s, {latency_us:.3g} us"})
    left_out = log.read_text(errors="replace").count("\nleft out: ")
    less = f"; {left_out} packs left out, which took too long or too much memory" if left_out else ""
    line = f"{len(found.stages)} points of {found.subject.model} on {found.subject.device}{less}"
    return Finding(PASSED, line, {"": rows})


def fidelity(check: Check) -> Finding:
    """Programs trained, and simulated with the profile; a program that does not fit the devices is left out."""
    return _programs(check, "fidelity", check.setup.fidelity(), _judge_fidelity)


def throughput(check: Check) -> Finding:
    """Throughput of the 1B model."""
    if not check.setup.on_gpu:
        return Finding(SKIPPED, "needs a GPU: the 1B model takes minutes an iteration on a CPU")
    return _programs(check, "throughput", check.setup.throughput(), _judge_throughput)


@dataclass(frozen=True, slots=True)
class Program:
    """A program that was trained, and its prediction."""

    workload: str
    strategy: str
    trained: Record
    predicted: Record


def _programs(check: Check, step: str, plan: Plan, judge: Callable[[list[Program], Rows, int], Finding]) -> Finding:
    setup, trained = check.setup, list[Program]()
    if not setup.profile.exists():
        return Finding(SKIPPED, "there is no profile: see the step profile")
    failed: Rows = []
    for workload, overrides in plan.workloads.items():
        job = [*plan.job, *overrides, *setup.profiled()]
        runs = check.runs(f"{step}_{workload}")
        check.say(f"predictions of {len(plan.strategies)} strategies on {workload}")
        predicted = runs.predict(job, plan.strategies, PREDICTION_S)
        for name in plan.strategies:
            prediction = predicted[name]
            if isinstance(prediction, str) or problem_of(prediction):
                reason, verdict = problem_of(prediction), verdict_without(prediction)
                failed.append({"workload": workload, "strategy": name, "verdict": verdict, "reason": reason})
                continue
            check.say(f"training: {name} on {workload}")
            typed = [*job, f"harness.dtype={setup.dtype}"]
            done = runs.train(name, name, typed, setup.num_devices, PROGRAM_S)
            if isinstance(done, Record) and done.status == "ok":
                trained.append(Program(workload, name, done, prediction))
            else:
                reason = problem_of(done)
                failed.append({"workload": workload, "strategy": name, "verdict": FAILED, "reason": reason})
    return judge(trained, failed, setup.num_devices)


def _judge_fidelity(trained: list[Program], failed: Rows, num_devices: int) -> Finding:
    rows = [
        timing_row(
            one.workload,
            one.strategy,
            layout_of(one.trained),
            series(one.trained, "iteration_time_s"),
            series(one.predicted, "iteration_time_s"),
        )
        for one in trained
    ]
    pairs = speedup_rows(rows, num_devices)
    tables = {"Iterations": rows, "Speed-ups": pairs} | _left_out(failed)
    return verdict_of(failed, len(rows), " and ".join(accuracy(rows, pairs)), tables)


def accuracy(rows: Sequence[dict[str, Any]], pairs: Sequence[dict[str, Any]]) -> list[str]:
    """Errors of iterations and speed-ups in words, beside their targets."""
    words = []
    for what, found, target in (("iterations", rows, TARGET_ITERATION), ("speed-ups", pairs, TARGET_SPEEDUP)):
        if errors := [abs(float(row["error"])) for row in found]:
            kept = "met" if median(errors) <= target else "missed"
            words.append(f"{what} are predicted to {median(errors):.1%} (median; target {target:.0%}: {kept})")
    return words


def _judge_throughput(trained: list[Program], failed: Rows, _: int) -> Finding:
    rows: Rows = []
    for one in trained:
        for what, record in (("measured", one.trained), ("predicted", one.predicted)):
            row = {"strategy": one.strategy, "": what, "layout": layout_of(record)}
            rows.append(row | metrics_of(record, THROUGHPUT, SCALE))
    best = max((float(row["TFLOPS/GPU"]) for row in rows if row[""] == "measured"), default=0.0)
    tables = {"Throughput": rows} | _left_out(failed)
    return verdict_of(failed, len(trained), f"{best:.4g} TFLOPS a GPU at best", tables)


def _left_out(failed: Rows) -> dict[str, Rows]:
    return {"Not measured": failed} if failed else {}


def verdict_of(failed: Rows, count: int, what: str, tables: dict[str, Rows]) -> Finding:
    """Failed if a program did, or none was left."""
    wrong = [row for row in failed if row["verdict"] == FAILED]
    left_out = len(failed) - len(wrong)
    fit = f"; {left_out} do not fit these devices" if left_out else ""
    line = f"{count} programs: {what}{fit}"
    if wrong:
        return Finding(
            FAILED, f"{len(wrong)} failed, {wrong[0]['strategy']} first ({wrong[0]['reason']}); {line}", tables
        )
    if not count:
        return Finding(FAILED, f"no program fits: {failed[0]['reason']}", tables)
    return Finding(PASSED, line, tables)


STEPS: dict[str, Callable[[Check], Finding]] = {
    "environment": environment,
    "tests": gpu_tests,
    "correctness": correctness,
    "profile": profile,
    "fidelity": fidelity,
    "throughput": throughput,
}
