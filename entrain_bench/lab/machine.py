"""Facts on this machine: processor, memory, GPUs, versions; ``python -m entrain_bench.lab.machine FILE`` writes them.

That process ends before anything is measured: asking torch for GPUs leaves a context on them, which takes memory.
Nothing that it writes names the host, its user or its folders.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from entrain_bench.base.hosttime import processor_name
from entrain_bench.lab.files import write_json
from entrain_bench.records.environment import versions

# Packages that decide what training does and how fast it is, in addition to those that decide simulated results.
PACKAGES = ("transformer-engine", "transformer-engine-torch", "flash-attn", "apex", "triton")
# Variables that change what communication and kernels do; other variables may hold secrets.
VARIABLES = ("NCCL_", "TORCH_NCCL_", "CUDA_", "NVTE_", "GLOO_", "OMP_")
QUERY = "index,name,driver_version,memory.total,power.limit,clocks.max.sm,pcie.link.gen.max,pcie.link.width.max"
NVIDIA_SMI_S = 60.0


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that trains: properties of each GPU that torch sees, host facts (``host_facts``, CUDA, NCCL).

    ``variables`` are environment variables that matter. ``nvidia_smi`` lists the GPUs and ``topology`` is the output of
    ``nvidia-smi topo -m``; both are empty without that tool.
    """

    gpus: list[dict[str, Any]]
    host: dict[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    nvidia_smi: str = ""
    topology: str = ""


def host_facts() -> dict[str, str]:
    """Processor, cores, memory, load, operating system, and versions of Python and packages."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "processor": processor_name(),
        "cores": str(cores),
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


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), asdict(find_machine()))
