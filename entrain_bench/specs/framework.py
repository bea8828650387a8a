"""Settings of the training framework; they are the same for every strategy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Annotated, Any, Self

from entrain_bench.base.errors import IncompatibleError, require, unknown_choice
from entrain_bench.specs.cluster import ATTENTION_KERNELS, DeviceSpec
from entrain_bench.specs.layer import BF16_BYTES, FP32_BYTES
from entrain_bench.specs.model import FULL, SELECTIVE, ModelSpec, ModuleSpec
from entrain_bench.specs.module_layers import CROSS_ENTROPIES, UNFUSED
from entrain_bench.specs.parse import Count, OneOf, between, check_fields

P2P = ("blocking", "overlapped")
SAMPLE, PACK = CP_SPLITS = ("sample", "pack")
FP32, BF16 = GRAD_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class FrameworkOptions:
    """Framework settings with Megatron-LM's defaults; ``experiments/config.yaml`` explains each key."""

    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    align_param_gather: bool = True
    p2p: Annotated[str, OneOf(P2P)] = "blocking"
    sequence_parallel: bool = True
    encoder_sp: bool = True
    encoder_cp: bool = True
    cp_split: Annotated[str, OneOf(CP_SPLITS)] = SAMPLE
    encoder_optimizers: Count = 1  # megatron-core's ``num_distributed_optimizer_instances``
    recompute_granularity: Annotated[str, OneOf((FULL, SELECTIVE))] = FULL
    attention_kernel: Annotated[str, OneOf(ATTENTION_KERNELS)] | None = None
    tp_overlap: Annotated[float, between(0, 1, "in [0, 1]")] = 0.0
    grad_dtype: Annotated[str, OneOf(GRAD_DTYPES)] = FP32
    cross_entropy: Annotated[str, OneOf(CROSS_ENTROPIES)] = UNFUSED
    communicator_bytes: Annotated[float, between(0, 1e10, "from 0 to 1e10")] = 0.0
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def receives_ahead(self) -> int:
        """Return for how many following actions receives are posted during an action; megatron-core's 1F1B: 1."""
        return 1 if self.p2p == "blocking" else 4

    def gradient_bytes(self, element_bytes: int) -> int:
        """Return the bytes of a gradient during accumulation and reduction, for elements of the given size."""
        return FP32_BYTES if self.grad_dtype == FP32 else element_bytes

    @property
    def cast_bytes(self) -> int:
        """Return the bytes per parameter that the optimizer step moves to cast the gradient to fp32."""
        return BF16_BYTES + FP32_BYTES if self.grad_dtype == BF16 else 0

    def of(self, module: ModuleSpec) -> Self:
        """Return the settings with the module's own sequence parallelism."""
        if self.encoder_sp or not module.is_encoder:
            return self
        return replace(self, sequence_parallel=False, encoder_sp=True)

    def splits_tokens(self, module: ModuleSpec, tp: int) -> bool:
        """Return whether the ``tp`` ranks of a tensor-parallel group hold different tokens between products."""
        return self.of(module).sequence_parallel and tp > 1

    def sequence_parts(self, module: ModuleSpec, cp: int) -> int:
        """Return the number of parts that ``cp`` context-parallel ranks split a module's sequences into."""
        return 1 if module.is_encoder and not self.encoder_cp else cp

    def token_parts(self, module: ModuleSpec, tp: int, cp: int) -> int:
        """Return how many ranks of a TP x CP group hold different tokens of a module between products."""
        whole = self.splits_tokens(module, tp) or module.weight_shards(tp) == 1
        return self.sequence_parts(module, cp) * (tp if whole else 1)

    def optimizer_instances(self, module: ModuleSpec, copies: int) -> int:
        """Return the copies of sharded optimizer states among ``copies`` ranks that hold the same weights."""
        return gcd(self.encoder_optimizers, copies) if module.is_encoder else 1

    def check_executable(self, module: ModuleSpec, cp: int, harness: str) -> None:
        """Raise ``IncompatibleError`` for settings that are priced, but that ranks cannot run for this module."""
        check_dense(module, f"harness={harness}", trains=harness == "train")
        whole_encoder = self.sequence_parts(module, cp) < cp
        uneven = self.cp_split == PACK and cp > 1 and harness == "emulate"
        for key, value, trained in (
            ("encoder_cp", "false" if whole_encoder else "true", "true"),
            ("cp_split", PACK if uneven else SAMPLE, SAMPLE),
            ("cross_entropy", self.cross_entropy, UNFUSED),
            ("attention_kernel", self.attention_kernel or "null", "null"),
            ("encoder_optimizers", self.encoder_optimizers if module.is_encoder else 1, 1),
        ):
            if value != trained:
                why = f"must be {trained} with harness={harness} ({module.name}, cp={cp})"
                raise IncompatibleError(f"{key}={value}: {why}. Use harness=simulate for others")

    def check_device(self, device: DeviceSpec) -> None:
        """Raise ``UserError`` for kernels of a later generation than the device runs."""
        available = ATTENTION_KERNELS[: ATTENTION_KERNELS.index(device.attention_kernel) + 1]
        kernel = self.attention_kernel
        allowed = f"one of {', '.join(available)} on {device.name}, or null"
        require(kernel is None or kernel in available, "attention_kernel", kernel, allowed)

    def check_modules(self, names: Sequence[str], learning: int) -> None:
        """Raise ``UserError`` if ``freeze`` names an unknown module, or leaves no ``learning`` parameters."""
        for name in self.freeze:
            if name not in names:
                raise unknown_choice("freeze", name, names)
        require(learning > 0, "freeze", [*self.freeze], "such that a module or a projector is trained")

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Build the settings from the top-level keys of a run."""
        given = {name: values[name] for name in cls.__dataclass_fields__}
        return cls(**given | {"freeze": tuple(str(name) for name in given["freeze"])})


def check_dense(module: ModuleSpec, what: str, *, trains: bool = False) -> None:
    """Raise ``IncompatibleError`` for parts of a module that are priced, but not run: experts only if it ``trains``."""
    for name in ("experts", "latent", "linear_attention", "gated_attention"):
        if getattr(module.config, name) and not (trains and name == "experts"):
            where = f"model.modules.{module.name}.{name}"
            raise IncompatibleError(f"{where}: is not supported with {what}. Use harness=simulate, or another model")


def with_options(model: ModelSpec, framework: FrameworkOptions) -> ModelSpec:
    """Return the model with this framework's loss, recomputed layers and frozen modules."""
    if framework.cross_entropy != UNFUSED:
        model = model.with_cross_entropy(framework.cross_entropy)
    return model.with_recomputation(framework.recompute_granularity).with_frozen(framework.freeze)
