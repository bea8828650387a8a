"""What there is on this machine, found out by a process of its own (``python -m entrain_bench.lab.gpu_check.machine``).

Asking torch for GPUs leaves a context on them, whose memory would be missing from what is measured afterwards.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from entrain_bench.base.hosttime import processor_name

PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "transformer-engine-torch",
    "flash-attn",
    "apex",
    "triton",
    "numpy",
    "numba",
)
# Variables that change what communication and kernels do; others may hold secrets.
VARIABLES = ("NCCL_", "TORCH_NCCL_", "CUDA_", "NVTE_", "GLOO_", "OMP_")
QUERY = "index,name,driver_version,memory.total,power.limit,clocks.max.sm,pcie.link.gen.max,pcie.link.width.max"
NVIDIA_SMI_S = 60.0


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that trains.

    Attributes:
        gpus: of each, what torch knows.
        packages: versions of what is installed.
        system: processor, memory, CUDA and so on.
        variables: environment variables that matter.
        nvidia_smi: GPUs as ``nvidia-smi`` lists them; empty without it.
        topology: what joins them, as ``nvidia-smi topo -m`` shows it; empty without it.
        identity: of all this, what results follow from.
    """

    gpus: list[dict[str, Any]]
    packages: dict[str, str]
    system: dict[str, str]
    variables: dict[str, str]
    nvidia_smi: str = ""
    topology: str = ""
    identity: dict[str, Any] = field(default_factory=dict)

    @property
    def listed(self) -> int:
        """GPUs that the driver lists."""
        return max(len(self.nvidia_smi.splitlines()) - 1, 0)


def find_machine() -> Machine:
    """This machine, as this process sees it."""
    import torch
    from torch.cuda import nccl

    gpus: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        values = torch.cuda.get_device_properties(index)
        capability = f"{values.major}.{values.minor}"
        gpus.append({"name": values.name, "memory_bytes": values.total_memory, "capability": capability})
    packages = {name: found for name in PACKAGES if (found := _version(name))}
    system = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": processor_name(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "load average": f"{os.getloadavg()[0]:.1f}",
        "CUDA": str(torch.version.cuda or "none"),
        "NCCL": ".".join(map(str, nccl.version())) if gpus else "none",  # type: ignore[no-untyped-call]
    }
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    listed = _nvidia_smi(f"--query-gpu={QUERY}", "--format=csv")
    return Machine(
        gpus,
        packages,
        system,
        variables,
        listed,
        _nvidia_smi("topo", "-m"),
        {
            "gpus": gpus,
            "packages": packages,
            **{name: system[name] for name in ("processor", "CUDA", "NCCL")},
            "variables": variables,
            "driver": listed,
        },
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _nvidia_smi(*arguments: str) -> str:
    """What the driver's tool prints; empty where there is none, or where it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    # Headings are underlined.
    return done.stdout.replace("\x1b[4m", "").replace("\x1b[0m", "").strip()


def read_machine(path: Path) -> Machine:
    """The machine that ``main`` has left in a file."""
    return Machine(**json.loads(path.read_text()))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asdict(find_machine()), indent=1))
