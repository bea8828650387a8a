"""The sections of the check: each looks at one thing and has a verdict of its own."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import pandas as pd

from entrain_bench.config.tree import choices
from entrain_bench.costs.profiled.file import read_profile
from entrain_bench.costs.profiled.profiled_cluster import fitted_link
from entrain_bench.lab.fidelity.comparison import TARGET_ITERATION, TARGET_SPEEDUP, pair_rows
from entrain_bench.lab.fidelity.predict import program_row
from entrain_bench.lab.gpu_check.runs import (
    CORRECTNESS,
    FAILED,
    PASSED,
    SKIPPED,
    Check,
    Finding,
    Rows,
    TestMatrix,
    layout_of,
    series,
)
from entrain_bench.lab.measuring import last_line, run_python
from entrain_bench.records.records import Record

# Seconds that a process may take; ranks that wait for each other give up after two minutes.
TESTS_S = 900.0
CORRECTNESS_S = 300.0
PROFILE_S = 900.0
PROGRAM_S = 420.0
# Largest relative difference of a loss from that of one device. Over gloo (2026-11) the largest was 6e-8 in float32 (19
# strategies, two ranks) and 2.6e-5 in bfloat16 (seven strategies, two and four ranks); GPU kernels add in other orders.
TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-4}
# Longest message of a test in a table, characters.
LONGEST = 200
# Columns of the throughput table: metric, factor.
THROUGHPUT = {
    "s/iteration": ("iteration_time_s", 1.0),
    "samples/s": ("samples_per_s", 1.0),
    "TFLOPS/GPU": ("tflops_per_gpu", 1.0),
    "MFU": ("mfu", 1.0),
    "peak GiB": ("peak_memory_bytes", 2.0**-30),
}
# What trains on any number of ranks, one included.
REFERENCE = "hetero_colocated"
say = partial(print, flush=True)
# The record of a run that was trained, and that of its prediction.
type Measured = tuple[Record, Record]


def environment(check: Check) -> Finding:
    """Report the machine; fail if torch does not see the GPUs that the driver lists."""
    machine = check.machine
    tables = {
        "GPUs": machine.gpus,
        "System": [{"what": name, "value": value} for name, value in machine.host.items()],
        "Variables": [{"variable": name, "value": value} for name, value in machine.variables.items()],
    }
    text = {"nvidia-smi": machine.nvidia_smi, "nvidia-smi topo -m": machine.topology}
    found = f"{len(machine.gpus)} GPUs ({machine.gpus[0]['name']})" if machine.gpus else "no GPU"
    # The first line is of headings.
    listed = len(machine.nvidia_smi.splitlines()) - 1
    if listed > len(machine.gpus) and "CUDA_VISIBLE_DEVICES" not in machine.variables:
        return Finding(FAILED, f"the driver lists {listed} GPUs, torch sees {len(machine.gpus)}", tables, text)
    used = f"{check.num_devices} {'GPUs' if check.on_gpu else 'ranks over gloo on the CPU'}"
    return Finding(PASSED, f"{found}; checked with {used}", tables, text)


def gpu_tests(check: Check) -> Finding:
    """Run the tests marked ``gpu``."""
    # Relative paths: the log names no folder of the user.
    files = [os.path.relpath(path) for path in check.gpu_tests]
    if not files:
        return Finding(SKIPPED, "no tests marked gpu: they come with the source, not with a wheel")
    log = check.folder / "tests.log"
    log.unlink(missing_ok=True)
    options = ["-m", "gpu", "-n", "0", "-q", "-rfEs", "--no-header", "-p", "no:cacheprovider"]
    wrong = run_python(["-m", "pytest", *files, *options], log, TESTS_S, check.environment)
    return judge_tests(log.read_text(errors="replace"), wrong)


def judge_tests(output: str, wrong: str) -> Finding:
    """Return what pytest printed: its last line, and a row per test that failed or was skipped (``-rfEs``)."""
    lines = [line for line in output.splitlines() if line.strip()]
    found = (re.match(r"(FAILED|ERROR|SKIPPED) (.*)", line) for line in lines)
    rows = [{"verdict": each[1].lower(), "test": each[2][:LONGEST]} for each in found if each]
    if wrong:
        return Finding(FAILED, f"{wrong} ({lines[-1]})", {"Tests": rows})
    return Finding(PASSED if " passed" in lines[-1] else SKIPPED, lines[-1], {"Tests": rows})


def correctness(check: Check) -> Finding:
    """Compare the losses of every strategy with those of one device."""
    dtypes = ["float32", "bfloat16"] if check.on_gpu else ["float32"]
    return judge_correctness({dtype: _losses(check, dtype) for dtype in dtypes})


def judge_losses(
    strategy: str, losses: Sequence[float], reference: Sequence[float], tolerance: float
) -> dict[str, Any]:
    """The row of a run: its last loss, its largest relative difference from the reference, and the verdict."""
    difference = math.nan
    if len(losses) == len(reference) > 0 and all(map(math.isfinite, [*losses, *reference])):
        difference = max(abs(own / wanted - 1.0) for own, wanted in zip(losses, reference, strict=True))
    return {
        "strategy": strategy,
        "last_loss": losses[-1] if losses else math.nan,
        "largest_difference": difference,
        # NaN fails every comparison.
        "verdict": PASSED if difference <= tolerance else FAILED,
    }


def judge_correctness(losses: dict[str, Rows]) -> Finding:
    """Return the verdict on all runs, by dtype; strategies without a layout do not count."""
    tables = {f"Losses in {dtype}": own for dtype, own in losses.items()}
    rows = [row for own in losses.values() for row in own]
    wrong = [str(row["strategy"]) for row in rows if row["verdict"] == FAILED]
    good, left_out = (sum(row["verdict"] == verdict for row in rows) for verdict in (PASSED, SKIPPED))
    fit = f"; {left_out} have no layout for this number of devices" if left_out else ""
    if wrong or not good:
        return Finding(FAILED, f"{good} of {len(rows) - left_out} runs equal; not: {', '.join(wrong)}{fit}", tables)
    tolerances = ", ".join(f"{TOLERANCES[dtype]:g} in {dtype}" for dtype in losses)
    return Finding(PASSED, f"{good} runs have one device's losses (to {tolerances}){fit}", tables)


def _losses(check: Check, dtype: str) -> Rows:
    section = f"correctness_{dtype}"
    job = [*CORRECTNESS, f"cluster.gpus_per_node={check.num_devices}"]
    given = f"harness.dtype={dtype}"
    say(f"training {REFERENCE} on one device in {dtype}")
    alone = [*CORRECTNESS, "cluster.gpus_per_node=1", given]
    record = check.train(section, "one_device", REFERENCE, alone, 1, CORRECTNESS_S)
    if record.status != "ok":
        reason = record.reason or record.status
        return [{"strategy": f"{REFERENCE} on one device", "verdict": FAILED, "reason": reason}]
    reference = series(record, "loss")
    strategies = ["megatron", "entrain", "fsdp"]
    if check.on_gpu or check.everything:
        strategies = choices("strategy")
    say(f"planning {len(strategies)} strategies")
    where = f"in {dtype} ({{number}} of {len(strategies)})"
    rows = list[dict[str, Any]]()
    for row, done in _trained(check, section, job, strategies, given, CORRECTNESS_S, where):
        if done:
            row |= judge_losses(row["strategy"], series(done[0], "loss"), reference, TOLERANCES[dtype])
            row |= {"layout": layout_of(done[0])}
        rows.append(row)
    return rows


def _trained(
    check: Check, section: str, job: Sequence[str], strategies: Sequence[str], given: str, limit_s: float, where: str
) -> Iterator[tuple[dict[str, Any], Measured | None]]:
    """Predict and train a job: rows of strategies with what was measured, or with the verdict and reason for none."""
    predicted = check.predict(section, job, strategies)
    for number, name in enumerate(strategies, start=1):
        plan = predicted[name]
        row = {"strategy": name}
        if plan.status != "ok":
            # A prediction that finished without a result has no layout that fits.
            verdict = SKIPPED if plan.finished else FAILED
            yield row | {"verdict": verdict, "reason": plan.reason or plan.status}, None
            continue
        say(f"training {name} {where.format(number=number)}")
        done = check.train(section, name, name, [*job, given], check.num_devices, limit_s)
        if done.status != "ok":
            yield row | {"verdict": FAILED, "reason": done.reason or done.status}, None
        else:
            yield row, (done, plan)


def profile(check: Check) -> Finding:
    """Measure layers, optimizer and communication, for the predictions of the next sections."""
    log = check.folder / "profile.log"
    log.unlink(missing_ok=True)
    say("profiling layers and communication")
    command = ["-m", "entrain_bench.cli", "profile", *check.profiling()]
    if wrong := run_python(command, log, PROFILE_S, check.environment):
        return Finding(FAILED, f"{wrong} ({last_line(log)}); a second call resumes")
    found = read_profile(check.profile, str(check.profile))
    constants = found.constants
    values = {
        "fastest product": f"{constants.peak_bf16_flops / 1e12:.4g} TFLOP/s",
        "memory bandwidth": f"{constants.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s",
        "to the host": f"{constants.host_bandwidth_bytes_per_s / 1e9:.4g} GB/s",
    }
    if found.collectives:
        link = fitted_link(found.collectives, "collectives")
        values["links"] = f"{link['bandwidth_bytes_per_s'] / 1e9:.3g} GB/s, {1e6 * link['latency_s']:.3g} us"
    left_out = log.read_text(errors="replace").count("\nleft out: ")
    less = f"; {left_out} packs skipped (too slow or too large)" if left_out else ""
    line = f"{len(found.stages)} points of {found.subject.model} on {found.subject.device}{less}"
    return Finding(PASSED, line, {"": [{"what": name, "value": value} for name, value in values.items()]})


def fidelity(check: Check) -> Finding:
    """Compare trained iterations with those simulated under the profile."""
    if not check.profile.exists():
        return Finding(SKIPPED, "there is no profile: see the section profile")
    measured, others = _measure(check, "fidelity", check.fidelity())
    rows = []
    for case, (trained, predicted) in measured:
        where = {"num_ranks": check.num_devices, "workload": case["workload"], "seed": 0, **case}
        # The first iteration warms up.
        took_s, predicted_s = (series(record, "iteration_time_s")[1:] for record in (trained, predicted))
        rows.append(program_row(where, layout_of(trained), fmean(took_s), fmean(predicted_s), took_s))
    table = pd.DataFrame(rows)
    pairs = pair_rows(table) if len(rows) > 1 else pd.DataFrame()
    words = [_words("iterations", table["iteration_error"], TARGET_ITERATION)] if len(table) else []
    words += [_words("speedups", pairs["error"], TARGET_SPEEDUP)] if len(pairs) else []
    speedups: Rows = [{str(name): value for name, value in row.items()} for row in pairs.to_dict("records")]
    tables = {"Iterations": rows, "Speedups": speedups, "Not measured": others}
    return verdict_of(others, len(rows), " and ".join(words), tables)


def _words(what: str, errors: pd.Series, target: float) -> str:
    error = float(errors.abs().median())
    return f"{what} predicted to {error:.1%} (median; target {target:.0%}: {'met' if error <= target else 'missed'})"


def throughput(check: Check) -> Finding:
    """Measure the throughput of the 1B model."""
    if not check.on_gpu:
        return Finding(SKIPPED, "needs a GPU: the 1B model takes minutes per iteration on a CPU")
    if not check.profile.exists():
        return Finding(SKIPPED, "there is no profile: see the section profile")
    measured, others = _measure(check, "throughput", check.throughput())
    rows: Rows = []
    for case, records in measured:
        for what, record in zip(("measured", "predicted"), records, strict=True):
            metrics = record.metrics
            values = {name: metrics[key] * factor for name, (key, factor) in THROUGHPUT.items() if key in metrics}
            rows.append({"strategy": case["strategy"], "": what, "layout": layout_of(record)} | values)
    best = max((float(row["TFLOPS/GPU"]) for row in rows if row[""] == "measured"), default=0.0)
    tables = {"Throughput": rows, "Not measured": others}
    return verdict_of(others, len(measured), f"{best:.4g} TFLOPS per GPU at best", tables)


def _measure(check: Check, section: str, matrix: TestMatrix) -> tuple[list[tuple[dict[str, Any], Measured]], Rows]:
    """Train and predict what fits the devices; return it by workload and strategy, and a row for everything else."""
    measured = list[tuple[dict[str, Any], Measured]]()
    others = list[dict[str, Any]]()
    for workload, overrides in matrix.workloads.items():
        job = [*matrix.job, *overrides, *check.profiled()]
        say(f"predicting {len(matrix.strategies)} strategies on {workload}")
        given = f"harness.dtype={check.dtype}"
        for row, done in _trained(
            check, f"{section}_{workload}", job, matrix.strategies, given, PROGRAM_S, f"on {workload}"
        ):
            case = {"workload": workload, **row}
            measured += [(case, done)] if done else []
            others += [] if done else [case]
    return measured, others


def verdict_of(others: Rows, count: int, what: str, tables: dict[str, Rows]) -> Finding:
    """Fail if a run did, or if no run was left; ``others`` are the rows of those that were not measured."""
    wrong = [row for row in others if row["verdict"] == FAILED]
    left_out = len(others) - len(wrong)
    line = f"{count} runs: {what}{f'; {left_out} do not fit these devices' if left_out else ''}"
    if wrong:
        line = f"{len(wrong)} failed, {wrong[0]['strategy']} first ({wrong[0]['reason']}); {line}"
    elif not count:
        return Finding(FAILED, f"no run fits: {others[0]['reason']}", tables)
    return Finding(FAILED if wrong else PASSED, line, tables)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the check: the question that it answers, what looks (at a ``Check``), how its tables are to be read."""

    question: str
    run: Callable[[Check], Finding]
    note: str = ""


SECTIONS = {
    "environment": Section("What is there?", environment),
    "tests": Section("Do the tests that need a GPU pass?", gpu_tests),
    "correctness": Section(
        "Does every strategy compute the losses of one device?",
        correctness,
        "The tiny model, three optimizer steps; the largest relative difference of a loss from that of one device. "
        "A strategy without a layout for this number of devices is skipped.",
    ),
    "profile": Section("How fast are layers, optimizer and communication?", profile),
    "fidelity": Section(
        "How accurate are predictions with that profile?",
        fidelity,
        "Seconds per iteration, mean over all but the first iteration, which warms up. The simulator predicts with the "
        "profile of this report, links included. Speedups: of `fast` over `slow`, with the 95% confidence interval "
        "over iterations. Packs larger than the profiled ones are extrapolated with the last slope.",
    ),
    "throughput": Section(
        "How fast does the 1B model train?",
        throughput,
        "Means over all but the first iteration; predictions as above. MFU is a share of the fastest product measured "
        "(section profile), not of a datasheet's peak.",
    ),
}
