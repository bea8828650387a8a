"""Tools of measurements: commands in subprocesses, repeated calls, facts on this machine, and files.

``python -m entrain_bench.lab.measuring FILE`` writes the facts and ends: asking torch for GPUs leaves a context on
them, which takes memory. Nothing that is written names the host, its user or its folders.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.base.hosttime import processor_name
from entrain_bench.records.code import versions
from entrain_bench.records.records import Record, Results
from entrain_bench.run.cells import compose_cells

if TYPE_CHECKING:
    import pandas as pd

    from entrain_bench.figures._style import Picture

# Time for a command that is told to end: it ends its ranks and tidies up.
END_S = 15.0
# Packages that decide results and speed of training, in addition to those that decide simulated results.
PACKAGES = ("transformer-engine", "transformer-engine-torch", "flash-attn", "apex", "triton")
# Variables that change communication and kernels; other variables may hold secrets.
VARIABLES = ("NCCL_", "TORCH_NCCL_", "CUDA_", "NVTE_", "GLOO_", "OMP_")


def run_python(arguments: Sequence[str], log: Path, timeout_s: float, environment: Mapping[str, str]) -> str:
    """Run Python with arguments, and append its output to the log; it ends with this process.

    Return a short description of a failure; empty for exit code 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"$ python {' '.join(arguments)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"took longer than {timeout_s:g} s"
        finally:
            # With all that it started.
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def run_strategies(
    strategies: Sequence[str],
    overrides: Sequence[str],
    folder: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Record]:
    """Run a job under strategies in a process of its own; return their records, kept in ``folder`` as in any sweep.

    If the process leaves no record, a failed record describes its end. Its output is added to
    ``<folder>.log``.
    """
    log = folder.with_name(f"{folder.name}.log")
    results = Results(folder)
    given = [f"strategy={','.join(strategies)}", *overrides, f"results_dir={results.root}", "mlflow=false"]
    try:
        cells = compose_cells(given, multirun=True)
    except UserError as error:
        return dict.fromkeys(strategies, Record("", "failed", str(error), {}, {}, ""))
    # The folder has other records, too: only these cells count, without unfinished records of an earlier process.
    for cell in cells:
        if not (known := results.read(cell.key)) or not known.finished:
            results.record_path(cell.key).unlink(missing_ok=True)
    wrong = run_python(["-m", "entrain_bench.cli", "--multirun", *given], log, timeout_s, environment or {})
    reason = f"{wrong or 'left no record of this configuration and code'} ({last_line(log)})"
    lost = Record("", "failed", reason, {}, {}, "")
    return {strategy: results.read(cell.key) or lost for strategy, cell in zip(strategies, cells, strict=True)}


def last_line(log: Path) -> str:
    """Return the last non-empty line of a command's output."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def allowed_cores() -> list[int]:
    """Cores on which this process may run."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that trains: GPUs that torch sees, facts on the host, and environment variables that matter."""

    gpus: list[str]
    host: dict[str, str]
    variables: dict[str, str] = field(default_factory=dict)


def host_facts() -> dict[str, str]:
    """Processor, cores, memory, load, operating system, and versions of Python and packages."""
    facts = {
        "processor": processor_name(),
        "cores": str(len(allowed_cores())),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "load average": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    facts |= versions()
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return facts


def find_machine() -> Machine:
    """Describe this machine as this process sees it."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    # Values that are paths or addresses would name folders or hosts.
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(VARIABLES) and "/" not in value and platform.node() not in value
    }
    return Machine(gpus, host_facts(), variables)


def write_json(path: Path, value: Any) -> None:
    """Write a value that JSON can hold; a reader never sees half of it."""
    write_atomically(path, json.dumps(value, indent=1).encode())


def read_json(path: Path) -> Any:
    """Return a JSON file's value, or None if there is no file or no JSON in it."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_outputs(
    results: Path,
    rows: pd.DataFrame,
    name: str,
    title: str,
    draw: Callable[[], Picture],
    command: str,
    setting: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
) -> None:
    """Write ``<name>.csv`` and ``figures/<name>.{pdf,png,csv,json}``, as figures of runs have them, into results.

    ``setting`` and ``seeds`` are stated in the JSON.
    """
    # Imported here, for most measurements draw nothing.
    from entrain_bench.figures._runner import described, render

    write_atomically(results / f"{name}.csv", rows.to_csv(index=False).encode())
    described_as = {"json": described(title, command, setting, seeds, {"ranks of this machine": "measured"})}
    for suffix, content in (render(draw) | described_as).items():
        write_atomically(results / "figures" / f"{name}.{suffix}", content)


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), asdict(find_machine()))
