"""From a row of the ledger to the jobs that it may have been, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from entrain_bench.lab.ledger.book import Book, Family, Machine, Source
from entrain_bench.lab.ledger.rows import LedgerRow
from entrain_bench.specs.cluster import FLASH1, FLASH2, FLASH3, UNFUSED
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.module_layers import FUSED, ModuleConfig, Role

# Sizes without which there is no job; feed-forward width and key-value heads have usual values.
NEEDED = ("hidden", "layers", "heads", "vocab", "seq_len", "gpus", "tp", "pp", "dp", "microbatch_size", "global_batch")
# Feed-forward width of a block without a gate, in hidden sizes.
USUAL_FFN = 4
HALF_PRECISION = ("bf16", "fp16")
FLOAT8 = ("fp8", "mxfp8", "nvfp4", "float8", "int4", "int8")
# Generations of kernels by words of `attention_kernel`; where only a family is named, it may be any of these.
GENERATIONS = {
    "flashattention 3": FLASH3,
    "flashattention 2": FLASH2,
    "flashattention 1": FLASH1,
    "pytorch unfused": UNFUSED,
    "fused softmax": UNFUSED,
}
NO_VERSION = "version not"
# Words of `note`.
REPEATED = "same value as in"
# Words of `zero_stage` after its number.
SMALL_GROUPS = "over "
ALL_RANKS = "over all"


@dataclass(frozen=True, slots=True)
class LedgerJob:
    """A training run of a language model, as plain values: equal jobs have equal programs.

    Attributes:
        module: the language model.
        causal: whether its attention is masked.
        outputs: numbers that its head makes of a token; 0 for the vocabulary's.
        machine: its nodes.
        gpus: how many.
        sequence_tokens: of every sequence.
        tp, cp, pp, dp, vpp: degrees; ``pp`` counts the ranks of a pipeline, each with ``vpp`` virtual stages.
        microbatch_size: sequences.
        num_microbatches: of a replica, in an iteration.
        recompute: whether blocks are recomputed in backward.
        sharded: whether weights are sharded over replicas (ZeRO-3, FSDP).
        framework: how the trainer runs it.
    """

    module: tuple[tuple[str, Any], ...]
    causal: bool
    outputs: int
    machine: tuple[str, tuple[tuple[str, float], ...]]
    gpus: int
    sequence_tokens: int
    tp: int
    cp: int
    pp: int
    dp: int
    vpp: int
    microbatch_size: int
    num_microbatches: int
    recompute: bool
    sharded: bool
    framework: FrameworkOptions

    @property
    def config(self) -> ModuleConfig:
        """The architecture of its model."""
        return ModuleConfig(**dict(self.module))


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a row has no job."""

    reason: str


def jobs_of(row: LedgerRow, book: Book) -> tuple[LedgerJob, ...] | Unusable:
    """The jobs that a row may have been: one, or as many as what it leaves open allows.

    Nothing is guessed: where a needed size is missing, or is something that the cost model does not price, there is a
    reason instead.
    """
    source, family = book.source(row.source), book.family(row.model)
    row, opened = _completed(row, source)
    if reason := _reason(row, source, family, opened):
        return Unusable(reason)
    assert family is not None
    choices = [[(name, value) for value in values] for name, values in opened.items()]
    found: dict[LedgerJob, None] = {}
    problem = ""
    for machine in source.machines(row.gpu_type):
        for chosen in product(*choices):
            made = _job(replace(row, **dict(chosen)), source, family, machine)
            if isinstance(made, Unusable):
                problem = problem or made.reason
            else:
                found[made] = None
    return tuple(found) or Unusable(problem)


def _completed(row: LedgerRow, source: Source) -> tuple[LedgerRow, dict[str, Any]]:
    """The row with what is said of all its source's, and what its other empty columns may be."""
    empty = {name for name in (*source.given, *source.open) if getattr(row, name) in (None, "")}
    given = {name: value for name, value in source.given.items() if name in empty}
    opened = {name: values for name, values in source.open.items() if name in empty - {*given}}
    if NO_VERSION in row.attention_kernel:
        opened["attention_kernel"] = ("FlashAttention 1", "FlashAttention 2")
    for name, needed in (("sequence_parallel", row.tp != 1), ("vpp", row.pp != 1)):
        if not needed:
            opened.pop(name, None)
    return replace(row, **given), opened


def _reason(row: LedgerRow, source: Source, family: Family | None, opened: Mapping[str, Any]) -> str:
    """Why a row has no job; empty if nothing speaks against one."""
    for reason in _reasons(row, source, family, opened):
        return reason
    return ""


def _reasons(row: LedgerRow, source: Source, family: Family | None, opened: Mapping[str, Any]) -> Iterator[str]:
    if REPEATED in row.note:
        yield "repeats a value of an older release"
    if row.outcome == "error":
        yield "ended with an error other than memory"
    if row.outcome == "ok" and row.published_s is None and row.peak_memory_gib is None:
        yield "neither time nor memory is stated"
    dtype = row.dtype.lower()
    if any(word in dtype for word in FLOAT8):
        yield "8-bit or 4-bit numbers are not priced"
    if dtype.startswith("fp32"):
        yield "fp32 is not priced"
    if not dtype.startswith(HALF_PRECISION):
        yield "number format is not stated"
    if family is None:
        yield "architecture is not known"
    elif family.skip:
        yield family.skip
    if (row.ep or 1) > 1:
        yield "mixture of experts, or hybrid"
    if "lora" in row.task.lower() or "peft" in row.task.lower():
        yield "low-rank adapters are not priced"
    if not source.machines(row.gpu_type):
        yield "device has no constants"
    missing = [name for name in NEEDED if getattr(row, name) is None and name not in opened]
    if missing:
        yield f"not stated: {', '.join(missing)}"
    if row.seq_at_most:
        yield "lengths of samples are not stated"


def _job(row: LedgerRow, source: Source, family: Family, machine: Machine) -> LedgerJob | Unusable:
    """The job of a row in which nothing is open."""
    tp, pp, dp, cp, vpp = row.tp or 1, row.pp or 1, row.dp or 1, row.cp or 1, row.vpp or 1
    heads, layers = row.heads or 1, row.layers or 1
    share, rest = divmod((row.global_batch or 0), dp * (row.microbatch_size or 1))
    ffn = row.ffn or (0 if family.model.get("gated_mlp") else USUAL_FFN * (row.hidden or 0))
    zero = row.zero_stage.strip()
    sharded = zero.startswith("3") or row.fsdp.lower() == "true"
    for wrong, reason in (
        (not ffn, "not stated: ffn"),
        (row.gpus != tp * pp * dp * cp, "GPUs are not TP x PP x DP x CP"),
        (bool(rest) or not share, "batch is no multiple of DP x microbatch"),
        (bool(heads % tp or ffn % tp), "heads or feed-forward width do not divide by TP"),
        (layers < pp * vpp, "fewer layers than stages"),
        (vpp > 1 and bool(share % pp), "microbatches do not divide by PP, as interleaving needs it"),
        (zero.startswith("2"), "gradients sharded in every micro-step (ZeRO-2) are not priced"),
        (SMALL_GROUPS in zero and ALL_RANKS not in zero, "optimizer states sharded over a few ranks are not priced"),
        (sharded and pp > 1, "sharded weights in a pipeline are not priced"),
    ):
        if wrong:
            return Unusable(reason)
    hidden = row.hidden or 0
    module = {
        "role": Role.LLM.value,
        "source": row.place,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": row.kv_heads or heads,
        "head_dim": hidden // heads,
        "ffn_hidden_size": ffn,
        "vocab_size": row.vocab or 0,
        "context_tokens": row.seq_len or 0,
        **family.model,
    }
    # The same model in another row is the same.
    module["source"] = ""
    settings = {**source.framework, **(source.pipelined if pp > 1 else {})}
    if row.grad_dtype:
        settings["grad_dtype"] = row.grad_dtype
    settings["distributed_optimizer"] = not zero.startswith("0")
    settings["attention_kernel"] = _generation(row)
    settings["norm_kernel"] = row.rmsnorm_kernel or FUSED
    settings["sequence_parallel"] = tp > 1 and row.sequence_parallel is not False
    return LedgerJob(
        tuple(module.items()),
        family.causal,
        family.outputs,
        (machine.cluster, tuple(machine.bandwidth.items())),
        row.gpus or 0,
        row.seq_len or 0,
        tp,
        cp,
        pp,
        dp,
        vpp,
        row.microbatch_size or 0,
        share,
        row.recompute.startswith("full"),
        sharded,
        FrameworkOptions(**settings),
    )


def _generation(row: LedgerRow) -> str | None:
    """Generation of a row's attention kernels; None if it names none: the device's own."""
    kernel = row.attention_kernel.lower()
    return next((found for words, found in GENERATIONS.items() if kernel.startswith(words)), None)
