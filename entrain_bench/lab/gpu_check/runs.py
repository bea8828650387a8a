"""Runs of the check by device; each has a process of its own that may fail or hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entrain_bench.base.errors import UserError, require
from entrain_bench.config.tree import choices, config_tree
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
# Ranks over gloo where there is no GPU.
CPU_RANKS = 2
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
            return ["model=qwen25vl_llama3_1b", "max_repetitions=20", "point_s=2", *common, "device=cuda"]
        small = ["model=tiny", "tokens=[16,128,1024]", "min_repetitions=3", "max_repetitions=5"]
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


def make_check(machine: Machine, num_devices: int | None, everything: bool, folder: Path, origin: str) -> Check:
    """The check of a machine; ``UserError`` where devices are missing, or no layout fits.

    Without ``num_devices`` as many as layouts are made for are used.
    """
    kind = "cuda" if machine.gpus else "cpu"
    present = len(machine.gpus)
    if num_devices is None:
        num_devices = max(n for n in NUM_DEVICES if n <= present) if kind == "cuda" else CPU_RANKS
    require(num_devices in NUM_DEVICES, "--devices", num_devices, "1, 2, 4 or 8")
    require(kind == "cpu" or num_devices <= present, "--devices", num_devices, f"at most the {present} GPUs here")
    return Check(machine, kind, num_devices, everything, folder, origin)


def layout_of(record: Record) -> str:
    """The layout of a run as one text."""
    return "; ".join(f"{module} {text}" for module, text in record.layout.items())


def series(record: Record, metric: str) -> list[float]:
    """A metric of every iteration of a run."""
    return [float(row[metric]) for row in record.iterations]
