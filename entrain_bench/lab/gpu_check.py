"""Check whether training works on this machine's GPUs, how fast it is, and how accurate predictions are.

The sections run one after the other and leave one folder: report.md, numbers.json and logs. A second call resumes:
runs of the same devices, options and code that finished are not repeated. Without a GPU ranks over gloo are checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd

from entrain_bench.answers.text import markdown_table
from entrain_bench.base.errors import UserError, explain, require, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.config.tree import choices
from entrain_bench.costs.profiled.file import read_profile
from entrain_bench.lab.fidelity import STRATEGIES, TARGET_ITERATION, TARGET_SPEEDUP, WORKLOADS, pair_rows, program_row
from entrain_bench.lab.measuring import Machine, last_line, read_json, run_python, run_strategies, write_json
from entrain_bench.records.code import hash_of, sources_of
from entrain_bench.records.records import Record
from entrain_bench.train.settings import DEVICES

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
# Rows of a table: values by column.
type Rows = list[dict[str, Any]]
# Seconds that a process may take; ranks that wait for each other give up after two minutes.
PREDICTION_S = 600.0
CORRECTNESS_S = 300.0
PROFILE_S = 900.0
PROGRAM_S = 420.0
# Numbers of devices that layouts are made for.
NUM_DEVICES = (1, 2, 4, 8)
# The planner chooses degrees; samples are small, because only equal losses are checked.
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
# A strategy that trains on any number of ranks, one included.
REFERENCE = "hetero_colocated"
# Largest relative difference of a loss from that of one device. Over gloo (2026-11) the largest was 6e-8 in float32 (19
# strategies, two ranks) and 2.6e-5 in bfloat16 (seven strategies, two and four ranks); GPU kernels add in other orders.
TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-4}
# Programs of which predictions are judged. On a CPU no transfer holds a rank.
FREE = ("layout.tp=null", "layout.dp=null", "iterations=4")
GPU_JOB = ("model=qwen25vl_llama3_1b", *FREE)
CPU_JOB = ("model=tiny", "microbatch_size=2", "p2p=overlapped", "global_batch=8", *FREE)
# One device has no pipeline.
ALONE = ("megatron", "dip", "mdp", "token_budget")
GPU_WORKLOADS = {name: (f"workload={name}",) for name in ("chartqa", "coco")}
CPU_WORKLOADS = {"even": ("workload=synthetic", *WORKLOADS["even"])}
# Metrics that are listed with every iteration time.
THROUGHPUT = ("samples_per_s", "tflops_per_gpu", "mfu", "peak_memory_bytes")
MACHINE_S = 300.0
# In every folder that a check has made.
MARK = ".gpu-check"
# Columns for programs that read numbers.json.
HIDDEN = ["repetitions_s", "repeat_error", "num_ranks", "seed", "chance", "sign_error"]
FORMATS = {"last_loss": ".6f", "largest_difference": ".1e", "error": "+.1%", "iteration_error": "+.1%", "mfu": ".1%"}
say = partial(print, flush=True)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a section: verdict, one line, tables of rows, and output to show unmodified, by title."""

    verdict: str
    result: str
    tables: Mapping[str, Rows] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """A machine, devices of it (``kind`` is ``cuda`` or ``cpu``), and the runs on them.

    ``folder`` is that of the report. Results of other devices, or of other code that measures, have another ``origin``.
    """

    machine: Machine
    kind: str
    num_devices: int
    folder: Path
    origin: str

    @property
    def on_gpu(self) -> bool:
        """Whether there are GPUs."""
        return self.kind == "cuda"

    @property
    def profile(self) -> Path:
        """Where the profile of this device is."""
        return self.folder / "runs" / self.origin / "profile.json"

    @property
    def job(self) -> list[str]:
        """The job of which predictions are judged, on the devices as measured.

        Times of packs outside the measured range are extrapolated with the last slope.
        """
        sized = (*GPU_JOB, f"global_batch={32 * self.num_devices}") if self.on_gpu else CPU_JOB
        device = ["cluster/device=profiled", f"cluster.device.path={self.profile}", "cluster.device.extrapolate=true"]
        if self.num_devices == 1:
            return [*sized, "cluster=h200x1", *device]
        return [*sized, "cluster=tiny", "cluster/node=profiled", *device, f"cluster.gpus_per_node={self.num_devices}"]

    def profiling(self) -> list[str]:
        """Arguments of ``entrain-bench profile``."""
        ranks = [n for n in NUM_DEVICES if n <= self.num_devices]
        # The tiny model has 4 heads.
        degrees = [n for n in ranks if self.on_gpu or n <= 4]
        lists = [f"tp={degrees}", f"cp={ranks}", f"ranks={ranks[1:]}"]
        common = [*(each.replace(" ", "") for each in lists), f"output={self.profile}", f"device={self.kind}"]
        if self.on_gpu:
            return ["model=qwen25vl_llama3_1b", "point_s=2", *common]
        small = ["model=tiny", "tokens=[16,128,1024]", "repetitions=5"]
        return [*small, "message_bytes=[4096,1048576]", *common]

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of processes: without GPUs none is seen."""
        return {} if self.on_gpu else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def run(
        self, section: str, name: str, strategies: Sequence[str], overrides: Sequence[str], limit_s: float
    ) -> dict[str, Record]:
        """Run a job under strategies in one process; return their records."""
        folder = self.profile.parent / section / name
        return run_strategies(strategies, overrides, folder, limit_s, self.environment)

    def training(self, num_devices: int, dtype: str) -> list[str]:
        """Overrides to train on a number of the devices."""
        names = {"device": self.kind, "num_ranks": num_devices, "dtype": dtype}
        return ["harness=train", *(f"harness.{name}={value}" for name, value in names.items())]

    def compare(
        self,
        section: str,
        job: Sequence[str],
        strategies: Sequence[str],
        dtype: str,
        limit_s: float,
        judge: Callable[[Record, Record], dict[str, Any]],
    ) -> Rows:
        """Predict and train a job under strategies: a row each, of ``judge`` (trained, predicted) or with a reason."""
        say(f"predicting {len(strategies)} strategies for {section}")
        rows: Rows = []
        for name, plan in self.run(section, "predicted", strategies, job, PREDICTION_S).items():
            if plan.status != "ok":
                # A prediction that finished without a result has no layout that fits.
                verdict = SKIPPED if plan.finished else FAILED
                rows.append({"strategy": name, "verdict": verdict, "reason": plan.reason or plan.status})
                continue
            say(f"training {name} for {section}")
            given = [*job, *self.training(self.num_devices, dtype)]
            done = self.run(section, name, [name], given, limit_s)[name]
            if done.status == "ok":
                rows.append({"strategy": name, "verdict": PASSED} | judge(done, plan))
            else:
                rows.append({"strategy": name, "verdict": FAILED, "reason": done.reason or done.status})
        return rows


def judge_runs(rows: Rows, what: str, tables: Mapping[str, Rows]) -> Finding:
    """Fail if a run failed or none passed; ``what`` describes the runs that passed."""
    failed = [row for row in rows if row["verdict"] == FAILED]
    skipped = [row for row in rows if row["verdict"] == SKIPPED]
    passed = len(rows) - len(failed) - len(skipped)
    line = f"{passed} runs: {what}{f'; {len(skipped)} do not fit these devices' if skipped else ''}"
    if failed:
        line = f"{len(failed)} failed, {failed[0]['strategy']} first ({failed[0]['reason']}); {line}"
    elif not passed:
        line = f"no run fits: {skipped[0]['reason']}"
    return Finding(FAILED if failed or not passed else PASSED, line, tables)


def environment(check: Check) -> Finding:
    """Report the machine; fail if torch sees no GPU although there is an NVIDIA driver."""
    machine = check.machine
    tables = {
        "System": [{"what": name, "value": value} for name, value in machine.host.items()],
        "Variables": [{"variable": name, "value": value} for name, value in machine.variables.items()],
    }
    log = check.folder / "environment.log"
    log.unlink(missing_ok=True)
    run_python(["-m", "torch.utils.collect_env"], log, MACHINE_S, check.environment)
    text = {"torch.utils.collect_env": log.read_text(errors="replace")}
    if shutil.which("nvidia-smi") and not machine.gpus and "CUDA_VISIBLE_DEVICES" not in machine.variables:
        return Finding(FAILED, "there is a driver of NVIDIA, but torch sees no GPU", tables, text)
    found = f"{len(machine.gpus)} GPUs ({machine.gpus[0]})" if machine.gpus else "no GPU"
    used = f"{check.num_devices} {'GPUs' if check.on_gpu else 'ranks over gloo on the CPU'}"
    return Finding(PASSED, f"{found}; checked with {used}", tables, text)


def correctness(check: Check) -> Finding:
    """Compare the losses of every strategy with those of one device."""
    strategies = choices("strategy") if check.on_gpu else ["megatron", "entrain", "fsdp"]
    rows: Rows = []
    for dtype in ["float32", "bfloat16"] if check.on_gpu else ["float32"]:
        section = f"correctness_{dtype}"
        say(f"training {REFERENCE} on one device in {dtype}")
        alone = [*CORRECTNESS, "cluster.gpus_per_node=1", *check.training(1, dtype)]
        record = check.run(section, "one_device", [REFERENCE], alone, CORRECTNESS_S)[REFERENCE]
        if record.status != "ok":
            return Finding(FAILED, f"{REFERENCE} on one device: {record.reason or record.status}", {"Losses": rows})
        judge = partial(judge_losses, reference=losses_of(record), tolerance=TOLERANCES[dtype])
        job = [*CORRECTNESS, f"cluster.gpus_per_node={check.num_devices}"]
        of_dtype = check.compare(section, job, strategies, dtype, CORRECTNESS_S, judge)
        rows += [{"dtype": dtype, **row} for row in of_dtype]
    return judge_runs(rows, "have one device's losses", {"Losses": rows})


def losses_of(record: Record) -> list[float]:
    """The loss of every iteration of a run."""
    return [float(row["loss"]) for row in record.iterations]


def judge_losses(trained: Record, _: Record, reference: Sequence[float], tolerance: float) -> dict[str, Any]:
    """Columns of a run: its last loss, its largest relative difference from the reference, and the verdict."""
    difference = math.nan
    losses = losses_of(trained)
    if len(losses) == len(reference) > 0 and all(map(math.isfinite, [*losses, *reference])):
        difference = max(abs(loss / wanted - 1.0) for loss, wanted in zip(losses, reference, strict=True))
    columns = {"last_loss": losses[-1] if losses else math.nan, "largest_difference": difference}
    # NaN fails every comparison.
    wrong = {"verdict": FAILED, "reason": f"losses differ by {difference:.1e}, more than {tolerance:g}"}
    return columns if difference <= tolerance else columns | wrong


def profile(check: Check) -> Finding:
    """Measure layers, optimizer and communication, for the predictions of the next sections."""
    log = check.folder / "profile.log"
    log.unlink(missing_ok=True)
    say("profiling layers and communication")
    command = ["-m", "entrain_bench.cli", "profile", *check.profiling()]
    if wrong := run_python(command, log, PROFILE_S, check.environment):
        return Finding(FAILED, f"{wrong} ({last_line(log)}); a second call resumes")
    found = read_profile(check.profile, str(check.profile))
    return Finding(PASSED, f"{len(found.stages)} points of {found.subject.model} on {found.subject.device}")


def fidelity(check: Check) -> Finding:
    """Compare trained iterations with those simulated under the profile; list their throughput."""
    if not check.profile.exists():
        return Finding(SKIPPED, "there is no profile: see the section profile")
    rows: Rows = []
    dtype = "bfloat16" if check.on_gpu else "float32"
    strategies = (STRATEGIES if check.num_devices > 1 else ALONE)[: None if check.on_gpu else 3]
    for workload, overrides in (GPU_WORKLOADS if check.on_gpu else CPU_WORKLOADS).items():
        job = [*check.job, *overrides]
        of_workload = check.compare(f"fidelity_{workload}", job, strategies, dtype, PROGRAM_S, judge_iterations)
        where = {"num_ranks": check.num_devices, "workload": workload, "seed": 0}
        rows += [{**where, **row} for row in of_workload]
    passed = pd.DataFrame([row for row in rows if row["verdict"] == PASSED])
    pairs = pair_rows(passed) if len(passed) > 1 else pd.DataFrame()
    words = [_words("iterations", passed["iteration_error"], TARGET_ITERATION)] if len(passed) else []
    words += [_words("speedups", pairs["error"], TARGET_SPEEDUP)] if len(pairs) else []
    speedups: Rows = [{str(name): value for name, value in row.items()} for row in pairs.to_dict("records")]
    return judge_runs(rows, " and ".join(words), {"Iterations": rows, "Speedups": speedups})


def judge_iterations(trained: Record, predicted: Record) -> dict[str, Any]:
    """Columns of a run: its iterations and their prediction, and throughput as measured."""
    throughput = {name: trained.metrics[name] for name in THROUGHPUT if name in trained.metrics}
    return program_row({}, [trained], [predicted]) | throughput


def _words(what: str, errors: pd.Series, target: float) -> str:
    error = float(errors.abs().median())
    return f"{what} predicted to {error:.1%} (median; target {target:.0%}: {'met' if error <= target else 'missed'})"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the check: its question, its function (of a ``Check``), and an explanation of its tables."""

    question: str
    run: Callable[[Check], Finding]
    note: str = ""


SECTIONS = {
    "environment": Section("What is there?", environment),
    "correctness": Section(
        "Does every strategy compute the losses of one device?",
        correctness,
        "The tiny model, three optimizer steps; the largest relative difference of a loss from that of one device. "
        "A strategy without a layout for this number of devices is skipped.",
    ),
    "profile": Section("How fast are layers, optimizer and communication?", profile),
    "fidelity": Section(
        "How fast is training, and how accurate are predictions with that profile?",
        fidelity,
        "Seconds per iteration: the mean without the first iteration, which warms up. The simulator predicts with the "
        "profile of this report. Speedups: of `fast` over `slow`, with the 95% confidence interval over iterations. "
        "MFU is a share of the fastest product measured.",
    ),
}


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the check."""
    parser.add_argument("--output", type=Path, help="folder of the report (default: results/gpu-check-<date>)")
    parser.add_argument("--device", default="auto", choices=DEVICES, help="auto: GPUs if there are any")
    parser.add_argument("--devices", type=int, help="1, 2, 4 or 8 (default: all GPUs, or 2 ranks on a CPU)")
    parser.add_argument("--sections", help=f"some of {','.join(SECTIONS)} (default: all)")


def run(options: Namespace) -> int:
    """Run the sections; return 1 if one failed. ``UserError`` for bad options."""
    names = options.sections.split(",") if options.sections else [*SECTIONS]
    if unknown := [name for name in names if name not in SECTIONS]:
        raise unknown_choice("--sections", unknown[0], SECTIONS)
    folder = options.output or options.results_dir / f"gpu-check-{datetime.now(UTC).date().isoformat()}"
    claim(folder)
    machine = look(folder, options.device)
    if options.device == "cuda" and not machine.gpus:
        raise UserError("--device=cuda: torch sees no GPU here")
    check = make_check(machine, options.devices, folder)
    findings = run_sections(check, {name: section for name, section in SECTIONS.items() if name in names})
    print(f"report: {folder / 'report.md'}")
    return 1 if any(finding.verdict == FAILED for finding in findings) else 0


def claim(folder: Path) -> None:
    """Make the folder of a check, or resume the check that made it; ``UserError`` if it cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = (folder / MARK).exists() or not any(folder.iterdir())
        require(fresh, "--output", folder, "a new or empty folder, or the folder of an earlier check")
        (folder / MARK).touch()
    except OSError as error:
        raise UserError(f"--output={folder}: cannot be written to ({error.strerror})") from error


def look(folder: Path, device: str) -> Machine:
    """Return the machine as a separate process sees it; ``UserError`` if that process fails."""
    place = folder / "machine.json"
    log = folder / "machine.log"
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    log.unlink(missing_ok=True)
    if wrong := run_python(["-m", "entrain_bench.lab.measuring", str(place)], log, MACHINE_S, hidden):
        raise UserError(f"--device={device}: device detection failed: {wrong} ({last_line(log)}). See {log}.")
    return Machine(**read_json(place))


def make_check(machine: Machine, num_devices: int | None, folder: Path) -> Check:
    """The check of a machine; ``UserError`` where devices are missing, or no layout fits.

    Without ``num_devices`` as many as layouts are made for are used, or two ranks over gloo without a GPU.
    """
    present = len(machine.gpus)
    if num_devices is None:
        num_devices = max(n for n in NUM_DEVICES if n <= present) if present else 2
    require(num_devices in NUM_DEVICES, "--devices", num_devices, "1, 2, 4 or 8")
    require(not present or num_devices <= present, "--devices", num_devices, f"at most the {present} GPUs here")
    return Check(machine, "cuda" if present else "cpu", num_devices, folder, origin_of(machine, num_devices))


def origin_of(machine: Machine, num_devices: int) -> str:
    """Return a hash of devices, packages, variables and measuring code, on which measurements depend."""
    # Load and kernel release are not part of it; a profile depends on the module below and on its imports.
    code = hash_of(sources_of(frozenset({"entrain_bench.train.profiling.recorder"})))
    fixed = {name: value for name, value in machine.host.items() if name not in ("load average", "system")}
    found = [machine.gpus, num_devices, fixed, machine.variables, code]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]


def run_sections(check: Check, sections: Mapping[str, Section]) -> list[Finding]:
    """Run sections; an error in one does not stop the next.

    numbers.json keeps their results, with those of other sections of these devices and options; report.md shows all.
    """
    place = check.folder / "numbers.json"
    known = {result["name"]: result for result in read_json(place) or [] if result["origin"] == check.origin}
    findings = list[Finding]()
    for number, (name, section) in enumerate(sections.items(), start=1):
        counted = f"[{number}/{len(sections)}] {name}"
        say(counted)
        started = perf_counter()
        try:
            finding = section.run(check)
        except Exception as error:
            finding = Finding(FAILED, explain(error) if not isinstance(error, UserError) else str(error))
        seconds = perf_counter() - started
        findings.append(finding)
        say(f"{counted}: {finding.verdict} ({seconds:.0f} s): {finding.result}")
        known[name] = {"name": name, "origin": check.origin, **asdict(finding), "seconds": seconds}
        write_json(place, [*known.values()])
        device = f"x {check.machine.gpus[0]}" if check.on_gpu else f"ranks on {check.machine.host['processor']}"
        title = f"Check of {check.num_devices} {device}, {datetime.now(UTC).date().isoformat()}"
        write_atomically(check.folder / "report.md", page(title, known).encode())
    return findings


def page(title: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the report: a title, and results by section; sections without one are listed as not run."""
    rows = []
    details = []
    for name, section in SECTIONS.items():
        if (result := results.get(name)) is None:
            rows.append([name, section.question, "not run", "", ""])
            continue
        rows.append([name, section.question, result["verdict"], result["result"], f"{result['seconds']:.0f}"])
        details += [f"\n## {name}: {result['verdict']}\n", result["result"], f"\n{section.note}"]
        for heading, table in result["tables"].items():
            if table:
                details += [f"\n**{heading}**\n" if heading else "", _table(table)]
        details += [f"\n`{heading}`\n\n```\n{text}\n```" for heading, text in result["text"].items() if text]
    heading = ["section", "question", "verdict", "result", "seconds"]
    made = "Made by `make gpu-check`. All numbers: `numbers.json`; output of every process: `*.log`, `runs/`."
    return "\n".join([f"# {title}\n", markdown_table(heading, rows, right=["seconds"]), made, *details]) + "\n"


def _table(rows: Rows) -> str:
    table = pd.DataFrame(rows).drop(columns=HIDDEN, errors="ignore")
    texts = [
        [
            "" if pd.isna(value) else f"{value:{FORMATS.get(name, '.4g')}}" if isinstance(value, float) else str(value)
            for name, value in zip(table.columns, row, strict=True)
        ]
        for row in table.to_numpy().tolist()
    ]
    return markdown_table([*table.columns], texts, right=[*table.select_dtypes("number").columns])
