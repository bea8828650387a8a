"""The sections of the check: each looks at one thing and has a verdict of its own; every run has its own process."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from entrain_bench.base.errors import UserError
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.costs.profiled.file import read_profile
from entrain_bench.costs.profiled.times import fitted_link
from entrain_bench.lab.fidelity.comparison import TARGET_ITERATION, TARGET_SPEEDUP, pair_rows
from entrain_bench.lab.fidelity.predict import program_row
from entrain_bench.lab.fidelity.programs import STRATEGIES, WORKLOADS
from entrain_bench.lab.measuring import Machine, last_line, run_python
from entrain_bench.records.records import Record, Results
from entrain_bench.run.cells import compose_cells

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
# Rows of a table: values by column.
type Rows = list[dict[str, Any]]
type Overrides = tuple[str, ...]
PREDICTION_S = 600.0
# Numbers of devices that layouts are made for.
NUM_DEVICES = (1, 2, 4, 8)
# The planner chooses degrees; samples are small, for what is checked is that all strategies compute the same.
CORRECTNESS = (
    # Costs are orders of magnitude, to plan with; no profile is needed.
    "cluster=hostx2",
    "model=tiny",
    "workload=synthetic",
    "workload.text.median=20",
    "workload.modalities.image.llm_tokens.median=8",
    "workload.modalities.image.llm_tokens.max=40",
    "workload.modalities.image.probability=0.8",
    "layout.tp=null",
    "layout.dp=null",
    "global_batch=8",
    "microbatch_size=2",
    "iterations=3",
)
# Programs of which predictions are judged. On a CPU no transfer holds a rank.
FREE = ("layout.tp=null", "layout.dp=null")
GPU_JOB = ("model=qwen25vl_llama3_1b", *FREE)
CPU_JOB = ("model=tiny", "microbatch_size=2", "p2p=overlapped", *FREE)
# One device has no pipeline.
ALONE = ("megatron", "dip", "mdp", "token_budget")
GPU_WORKLOADS: Mapping[str, Overrides] = {name: (f"workload={name}",) for name in ("chartqa", "coco", "opencqa_ocr")}
CPU_WORKLOADS: Mapping[str, Overrides] = {name: ("workload=synthetic", *WORKLOADS[name]) for name in ("even", "uneven")}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a section: verdict, one line, tables of rows, and output to show unmodified, by title."""

    verdict: str
    result: str
    tables: Mapping[str, Rows] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TestMatrix:
    """Strategies on workloads: what is trained and predicted, under the overrides of all and of each workload."""

    strategies: tuple[str, ...]
    workloads: Mapping[str, Overrides]
    job: Overrides


@dataclass(frozen=True, slots=True)
class Check:
    """A machine, devices of it (``kind`` is ``cuda`` or ``cpu``), and the runs on them.

    With ``everything`` all strategies and workloads are checked, by default a part. ``folder`` is that of the report.
    Another machine or other code that measures has another ``origin``.
    """

    machine: Machine
    kind: str
    num_devices: int
    everything: bool
    folder: Path
    origin: str

    @property
    def identity(self) -> str:
        """Results with another one are not of these devices and options."""
        return f"{self.origin} {self.kind} {self.num_devices} {self.everything}"

    @property
    def on_gpu(self) -> bool:
        """Whether there are GPUs."""
        return self.kind == "cuda"

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of processes: without GPUs none is seen."""
        return {} if self.on_gpu else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    @property
    def runs(self) -> Path:
        """Where all is that was measured here, and nothing of another machine's."""
        return self.folder / "runs" / self.origin

    @property
    def profile(self) -> Path:
        """Where the profile of this device is."""
        return self.runs / "profile.json"

    @property
    def dtype(self) -> str:
        """In which speed is measured."""
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def gpu_tests(self) -> list[Path]:
        """Files of the suite with tests marked ``gpu``; none in a wheel."""
        folder = config_tree().resolve().parent / "tests"
        return sorted(path for path in folder.rglob("test_*.py") if "mark.gpu" in path.read_text())

    def profiled(self) -> list[str]:
        """The cluster of these devices as measured; packs outside what was measured go on with the last slope."""
        device = ["cluster/device=profiled", f"cluster.device.path={self.profile}", "cluster.device.extrapolate=true"]
        if self.num_devices == 1:
            return ["cluster=h200x1", *device]
        return ["cluster=tiny", "cluster/node=profiled", *device, f"cluster.gpus_per_node={self.num_devices}"]

    def profiling(self) -> list[str]:
        """Arguments of ``entrain-bench profile``."""
        ranks = [n for n in NUM_DEVICES if n <= self.num_devices]
        # The tiny model has 4 heads.
        degrees = [n for n in ranks if self.on_gpu or n <= 4]
        lists = [f"tp={degrees}", f"cp={ranks}", f"ranks={ranks[1:]}"]
        common = [*(each.replace(" ", "") for each in lists), f"output={self.profile}"]
        if self.on_gpu:
            return ["model=qwen25vl_llama3_1b", "point_s=2", *common, "device=cuda"]
        small = ["model=tiny", "tokens=[16,128,1024]", "repetitions=5"]
        return [*small, "message_bytes=[4096,1048576]", *common, "device=cpu"]

    def fidelity(self) -> TestMatrix:
        """Programs that are trained and predicted."""
        strategies: tuple[str, ...] = STRATEGIES if self.num_devices > 1 else ALONE
        if self.everything:
            strategies = tuple(choices("strategy"))
        elif not self.on_gpu:
            strategies = strategies[:3]
        workloads, job = (GPU_WORKLOADS, GPU_JOB) if self.on_gpu else (CPU_WORKLOADS, CPU_JOB)
        num_workloads = len(workloads) if self.everything else 1 + self.on_gpu
        sizes = (f"global_batch={32 if self.on_gpu else 8}", "iterations=4")
        return TestMatrix(strategies, dict([*workloads.items()][:num_workloads]), (*job, *sizes))

    def throughput(self) -> TestMatrix:
        """Programs whose throughput is of interest: the 1B model, on one GPU out of the box only."""
        strategies = STRATEGIES if self.num_devices > 1 else ALONE[:1]
        job = (*GPU_JOB, f"global_batch={32 * self.num_devices}", "iterations=6")
        return TestMatrix(strategies, {"chartqa": GPU_WORKLOADS["chartqa"]}, job)

    def predict(self, section: str, overrides: Sequence[str], strategies: Sequence[str]) -> dict[str, Record]:
        """Simulate a job under strategies in one process."""
        given = ["harness=simulate", *overrides]
        return self._run(self.runs / section, "predicted", strategies, given, PREDICTION_S)

    def train(
        self, section: str, name: str, strategy: str, overrides: Sequence[str], num_devices: int, timeout_s: float
    ) -> Record:
        """Train as the run ``name`` on a number of the devices."""
        harness = ["harness=train", f"harness.device={self.kind}", f"harness.num_ranks={num_devices}"]
        return self._run(self.runs / section, name, [strategy], [*harness, *overrides], timeout_s)[strategy]

    def _run(
        self, folder: Path, name: str, strategies: Sequence[str], overrides: Sequence[str], timeout_s: float
    ) -> dict[str, Record]:
        """Records by strategy; if a process left none, a failed record says what became of the process."""
        log = folder / f"{name}.log"
        results = Results(folder / name)
        given = [f"strategy={','.join(strategies)}", *overrides, f"results_dir={results.root}", "mlflow=false"]
        try:
            cells = compose_cells(given, multirun=True)
        except UserError as error:
            return dict.fromkeys(strategies, Record("", "failed", str(error), {}, {}, ""))
        # The folder has records of other devices, code and options, too: what counts is of these cells. What an earlier
        # process left unfinished would be taken for what this one leaves.
        for cell in cells:
            if not (found := results.read(cell.key)) or not found.finished:
                results.record_path(cell.key).unlink(missing_ok=True)
        wrong = run_python(["-m", "entrain_bench.cli", "--multirun", *given], log, timeout_s, self.environment)
        reason = f"{wrong or 'left no record of this configuration and code'} ({last_line(log)})"
        lost = Record("", "failed", reason, {}, {}, "")
        return {strategy: results.read(cell.key) or lost for strategy, cell in zip(strategies, cells, strict=True)}


def layout_of(record: Record) -> str:
    """The layout of a run as one text."""
    return "; ".join(f"{module} {text}" for module, text in record.layout.items())


def series(record: Record, metric: str) -> list[float]:
    """A metric of every iteration of a run."""
    return [float(row[metric]) for row in record.iterations]


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
