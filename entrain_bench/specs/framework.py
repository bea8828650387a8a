"""Settings of the training framework; they are the same for every strategy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Annotated, Any, Self

from entrain_bench.base.errors import IncompatibleError, require, unknown_choice
from entrain_bench.specs.adapters import Adapter, check_modules
from entrain_bench.specs.cluster import ATTENTION_KERNELS, DeviceSpec
from entrain_bench.specs.layer import BF16_BYTES, FP32_BYTES
from entrain_bench.specs.model import FULL, SELECTIVE, ModelSpec, ModuleSpec
from entrain_bench.specs.module_layers import CROSS_ENTROPIES, UNFUSED
from entrain_bench.specs.parse import Count, OneOf, between, check_fields, parse

P2P = ("blocking", "overlapped")
SAMPLE, PACK = CP_SPLITS = ("sample", "pack")
FP32, BF16 = GRAD_DTYPES = ("fp32", "bf16")
UNPADDED, LONGEST, MULTIPLE = PADDINGS = ("none", "longest", "multiple")
FP8, FP8_BLOCK = "fp8", "fp8_block"
# Bytes that casting a value to 8 bits moves: bf16 read, rows and columns written, and fp32 scales of each 128 values.
CAST_BYTES = {BF16: 0.0, FP8: 4.0, FP8_BLOCK: 4.0 + 2 * 4 / 128}


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
    padding: Annotated[str, OneOf(PADDINGS)] = UNPADDED
    pad_to_multiple_of: Count = 8  # tokens; only with ``padding=multiple``
    precision: Annotated[str, OneOf(tuple(CAST_BYTES))] = BF16
    freeze: tuple[str, ...] = ()
    adapter: Adapter = field(default_factory=Adapter)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def receives_ahead(self) -> int:
        """Return for how many following actions receives are posted during an action; megatron-core's 1F1B: 1."""
        return 1 if self.p2p == "blocking" else 4

    @property
    def padding_multiple(self) -> int | None:
        """Return the tokens of which padded lengths are a multiple; None if microbatches are not padded."""
        return {UNPADDED: None, LONGEST: 1, MULTIPLE: self.pad_to_multiple_of}[self.padding]

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
        if self.adapter.rank:
            raise IncompatibleError(f"adapter.rank={self.adapter.rank}: must be 0 with harness={harness}. Use simulate")
        whole_encoder = self.sequence_parts(module, cp) < cp
        uneven = self.cp_split == PACK and cp > 1 and harness == "emulate"
        for key, value, trained in (
            ("encoder_cp", "false" if whole_encoder else "true", "true"),
            ("cp_split", PACK if uneven else SAMPLE, SAMPLE),
            ("cross_entropy", self.cross_entropy, UNFUSED),
            ("attention_kernel", self.attention_kernel or "null", "null"),
            ("padding", self.padding, UNPADDED),
            ("precision", self.precision, BF16),
            ("encoder_optimizers", self.encoder_optimizers if module.is_encoder else 1, 1),
        ):
            if value != trained:
                why = f"must be {trained} with harness={harness} ({module.name}, cp={cp})"
                raise IncompatibleError(f"{key}={value}: {why}. Use harness=simulate for others")

    def check_device(self, device: DeviceSpec) -> None:
        """Raise ``UserError`` for kernels of a later generation than the device runs, and unknown rates of products."""
        known = self.precision == BF16 or device.fp8_speedup > 0
        require(known, "precision", self.precision, f"{BF16} on {device.name}: no rate of its 8-bit products is known")
        available = ATTENTION_KERNELS[: ATTENTION_KERNELS.index(device.attention_kernel) + 1]
        kernel = self.attention_kernel
        allowed = f"one of {', '.join(available)} on {device.name}, or null"
        require(kernel is None or kernel in available, "attention_kernel", kernel, allowed)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Build the settings from the top-level keys of a run."""
        given = {name: values[name] for name in cls.__dataclass_fields__}
        adapter = (
            given["adapter"] if isinstance(given["adapter"], Adapter) else parse(Adapter, given["adapter"], "adapter")
        )
        return cls(**given | {"freeze": tuple(str(name) for name in given["freeze"]), "adapter": adapter})


def check_dense(module: ModuleSpec, what: str, *, trains: bool = False) -> None:
    """Raise ``IncompatibleError`` for parts of a module that are priced, but not run: experts only if it ``trains``."""
    for name in ("experts", "latent", "linear_attention", "gated_attention"):
        if getattr(module.config, name) and not (trains and name == "experts"):
            where = f"model.modules.{module.name}.{name}"
            raise IncompatibleError(f"{where}: is not supported with {what}. Use harness=simulate, or another model")


def with_options(model: ModelSpec, framework: FrameworkOptions) -> ModelSpec:
    """Return the model with this framework's loss, recomputed layers, frozen modules and adapters.

    ``UserError`` if ``freeze`` or ``adapter`` names an unknown part, or nothing learns.
    """
    for name in framework.freeze:
        if name not in model.freezable:
            raise unknown_choice("freeze", name, model.freezable)
    check_modules(framework.adapter, [module.name for module in model.modules])
    if framework.cross_entropy != UNFUSED:
        model = model.with_cross_entropy(framework.cross_entropy)
    made = model.with_recomputation(framework.recompute_granularity).with_frozen(framework.freeze, framework.adapter)
    learning = sum(module.learning_parameters for module in made.modules)
    require(learning > 0, "freeze", [*framework.freeze], "such that a module, a projector or an adapter is trained")
    return made
