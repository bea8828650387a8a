"""One way to measure: commands in processes of their own, repeated calls, facts on this machine, and files.

``python -m entrain_bench.lab.measuring FILE`` writes the facts and ends: asking torch for GPUs leaves a context on
them, which takes memory. Nothing that is written names the host, its user or its folders.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from entrain_bench.base.files import write_atomically
from entrain_bench.base.hosttime import processor_name
from entrain_bench.records.code import versions

if TYPE_CHECKING:
    import pandas as pd

    from entrain_bench.figures._style import Picture

# What a command that is told to end may take to end its ranks and tidy up.
END_S = 15.0
# Packages that decide what training does and how fast it is, in addition to those that decide simulated results.
PACKAGES = ("transformer-engine", "transformer-engine-torch", "flash-attn", "apex", "triton")
# Variables that change what communication and kernels do; other variables may hold secrets.
VARIABLES = ("NCCL_", "TORCH_NCCL_", "CUDA_", "NVTE_", "GLOO_", "OMP_")
QUERY = "index,name,driver_version,memory.total,power.limit,clocks.max.sm,pcie.link.gen.max,pcie.link.width.max"
NVIDIA_SMI_S = 60.0
# Repetitions of a call, calls before that are not timed, and seconds after which a call is repeated less often.
REPEATS = 10
WARM_UPS = 2
LONG_S = 3.0


def run_python(arguments: Sequence[str], log: Path, timeout_s: float, environment: Mapping[str, str]) -> str:
    """Run Python with arguments, output added to the log; whatever ends this process early ends the other one, too.

    Returns what was wrong, in a few words; empty if it ended with exit code 0.
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


def last_line(log: Path) -> str:
    """The last line of what a command printed that is not empty."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def time_calls(
    call: Callable[[int], Any], repeats: int = REPEATS, timer: Callable[[], float] = perf_counter
) -> list[float]:
    """Seconds of repeated calls (at least three, after warm-ups), each of which receives its index."""
    times: list[float] = []
    for index in range(WARM_UPS + repeats):
        started = timer()
        call(index)
        times.append(timer() - started)
        if len(times) >= WARM_UPS + 3 and sum(times) > LONG_S:
            break
    return times[WARM_UPS:]


def peak_rss_gb() -> float:
    """Peak resident memory of this process, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def allowed_cores() -> list[int]:
    """Cores on which this process may run."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that trains: GPUs that torch sees, facts on the host, and environment variables that matter.

    ``nvidia_smi`` lists the GPUs, ``topology`` is that of ``nvidia-smi topo -m``; both are empty without that tool.
    """

    gpus: list[dict[str, Any]]
    host: dict[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    nvidia_smi: str = ""
    topology: str = ""


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
    from torch.cuda import nccl

    gpus: list[dict[str, Any]] = [
        {"name": each.name, "memory_bytes": each.total_memory, "capability": f"{each.major}.{each.minor}"}
        for each in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    libraries = {
        "CUDA": str(torch.version.cuda or "none"),
        "NCCL": ".".join(map(str, nccl.version())) if gpus else "none",  # type: ignore[no-untyped-call]
    }
    # Values that are paths or addresses would name folders or hosts.
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(VARIABLES) and "/" not in value and platform.node() not in value
    }
    listed = _nvidia_smi(f"--query-gpu={QUERY}", "--format=csv")
    return Machine(gpus, host_facts() | libraries, variables, listed, _nvidia_smi("topo", "-m"))


def _nvidia_smi(*arguments: str) -> str:
    """Output of the driver's tool; empty if the tool is absent or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    # Headings are underlined.
    return done.stdout.replace("\x1b[4m", "").replace("\x1b[0m", "").strip()


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a value that JSON can hold, None: on one line; a reader never sees half of it."""
    write_atomically(path, json.dumps(value, indent=indent).encode())


def read_json(path: Path) -> Any:
    """Return what a file holds, or None if there is no file or no JSON in it."""
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
    costs: str,
) -> None:
    """Write ``<name>.csv`` and ``figures/<name>.{pdf,png,csv,json}``, as figures of runs have them, into results.

    ``setting``, ``seeds`` and ``costs``, the source of seconds, are stated in the JSON.
    """
    # Of those who measure only some draw.
    from entrain_bench.figures._runner import described, render

    write_atomically(results / f"{name}.csv", rows.to_csv(index=False).encode())
    described_as = {"json": described(title, command, setting, seeds, {"ranks of this machine": costs})}
    for suffix, content in (render(draw) | described_as).items():
        write_atomically(results / "figures" / f"{name}.{suffix}", content)


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), asdict(find_machine()))
