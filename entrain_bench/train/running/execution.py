"""What a run ran with, for its record: two runs with different devices, types or kernels can be told apart."""

from __future__ import annotations

from importlib.metadata import packages_distributions, version

import torch
import torch.distributed as dist

from entrain_bench.train.device import device_name, dtype_name
from entrain_bench.train.messages.control import gather_json
from entrain_bench.train.modules.kernels import PACKAGES, Kernels
from entrain_bench.train.running.runtime import Runtime


def ran_with(runtime: Runtime, control: dist.ProcessGroup) -> tuple[dict[str, str], tuple[str, ...]]:
    """Device, dtype, kernels and versions, all ranks' joined by "and"; what kernels were passed over. Collective."""
    kernels = runtime.kernels
    own = {
        "device": device_name(runtime.device),
        "dtype": dtype_name(runtime.dtype),
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
        **{f"attention.{name}": str(kernel) for name, kernel in kernels.attention.items()},
        **_versions(kernels),
    }
    everyone = gather_json({"execution": own, "remarks": kernels.passed_over}, control)
    values = {name: [found["execution"][name] for found in everyone] for name in own}
    remarks = dict.fromkeys(line for found in everyone for line in found["remarks"])
    return {name: " and ".join(dict.fromkeys(found)) for name, found in values.items()}, tuple(remarks)


def _versions(kernels: Kernels) -> dict[str, str]:
    """Of the packages that attention is computed by."""
    used = {PACKAGES[kernel][1].partition(".")[0] for kernel in kernels.attention.values() if kernel in PACKAGES}
    named = packages_distributions() if used else {}
    return {module: " ".join(version(owner) for owner in named.get(module, ())) for module in sorted(used)}
