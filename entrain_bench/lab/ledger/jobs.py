"""From a row of the ledger to the jobs that it may have been, or the reason why there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from entrain_bench.lab.ledger.book import Book, Family, Machine, Source
from entrain_bench.lab.ledger.options import LedgerOptions
from entrain_bench.lab.ledger.rows import LedgerRow
from entrain_bench.specs.cluster import FLASH1, FLASH2, FLASH3, UNFUSED
from entrain_bench.specs.framework import GRAD_DTYPES
from entrain_bench.specs.module_layers import FUSED, ModuleConfig, Role

# Without these there is no job; feed-forward width and key-value heads have usual values.
NEEDED = (
    *("hidden", "layers", "heads", "vocab", "seq_len", "gpus", "tp", "pp", "dp", "cp"),
    *("microbatch_size", "global_batch", "recompute", "zero_stage"),
)
# Feed-forward width of a block without a gate, in hidden sizes.
USUAL_FFN = 4
HALF_PRECISION = ("bf16", "fp16")
FLOAT8 = ("fp8", "mxfp8", "nvfp4", "float8", "int4", "int8")
# Words of `note`.
REPEATED = "same value as in"
# What `zero_stage` says after its number: the ranks that share out optimizer states.
GROUP = re.compile(r"over (\d+)")
# What `recompute` says of some layers: how many, of all or of each stage.
SOME_LAYERS = re.compile(r"full on (\d+)( \* pp)? layers")
# Generations of attention kernels by what `attention_kernel` says, the first that is in it: any of a family where that
# alone is named, the device's own where nothing is said.
KERNELS: Mapping[str, tuple[str | None, ...]] = {
    "flashattention 3": (FLASH3,),
    "flashattention 2": (FLASH2,),
    "flashattention 1": (FLASH1,),
    "flashattention": (FLASH1, FLASH2),
    "softmax": (UNFUSED,),
    "unfused": (UNFUSED,),
    "": (None,),
}
EAGER = "pytorch"


@dataclass(frozen=True, slots=True)
class LedgerJob:
    """A training run of a language model, as plain values: equal jobs have equal programs.

    Attributes:
        module: the language model.
        causal: whether its attention is masked.
        outputs: numbers that its head makes of a token; 0 for the vocabulary's.
        machine: its device and nodes.
        gpus: how many.
        sequence_tokens: of every sequence.
        tp, cp, pp, dp, vpp: degrees; ``pp`` counts the ranks of a pipeline, each with ``vpp`` virtual stages.
        microbatch_size: sequences.
        num_microbatches: of a replica, in an iteration.
        recompute: blocks of a stage that are recomputed in backward, at most.
        eager_scores: whether attention is of PyTorch's single operators: scale and mask are kernels of their own.
        dropout: whether there is dropout of scores and hidden states, by kernels of its own.
        sharded: whether weights are sharded over replicas (ZeRO-3, FSDP).
        framework: how the trainer runs it.
    """

    module: tuple[tuple[str, Any], ...]
    causal: bool
    outputs: int
    machine: Machine
    gpus: int
    sequence_tokens: int
    tp: int
    cp: int
    pp: int
    dp: int
    vpp: int
    microbatch_size: int
    num_microbatches: int
    recompute: int
    eager_scores: bool
    dropout: bool
    sharded: bool
    framework: LedgerOptions

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
    source = book.source(row)
    family = book.family(row.model)
    row, opened = _completed(row, source)
    if reason := _reason(row, source, family, opened):
        return Unusable(reason)
    assert family is not None
    choices = [[(name, value) for value in values] for name, values in opened.items()]
    found: dict[LedgerJob, None] = {}
    problem = ""
    for machine in source.machines(row.gpu_type):
        for kernel, *chosen in product(_kernels(row), *choices):
            made = _job(replace(row, **dict(chosen)), source, family, machine, kernel)
            if isinstance(made, Unusable):
                problem = problem or made.reason
            else:
                found[made] = None
    return tuple(found) or Unusable(problem)


def _kernels(row: LedgerRow) -> tuple[str | None, ...]:
    """Generations of attention kernels that the row may have had; None for the device's own."""
    said = row.attention_kernel.lower()
    return next(kernels for word, kernels in KERNELS.items() if word in said)


def _completed(row: LedgerRow, source: Source) -> tuple[LedgerRow, dict[str, Any]]:
    """The row with what is said of all its source's, and what its other empty columns may be."""
    empty = {name for name in (*source.given, *source.open) if getattr(row, name) in (None, "")}
    given = {name: value for name, value in source.given.items() if name in empty}
    opened = {name: values for name, values in source.open.items() if name in empty - {*given}}
    if not row.grad_dtype and "grad_dtype" not in source.framework:
        opened["grad_dtype"] = GRAD_DTYPES
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
    needed = [*NEEDED, *(["sequence_parallel"] if row.tp != 1 else []), *(["vpp"] if row.pp != 1 else [])]
    missing = [name for name in needed if getattr(row, name) in (None, "") and name not in opened]
    if missing:
        yield f"not stated: {', '.join(missing)}"
    if row.seq_at_most:
        yield "lengths of samples are not stated"


def _job(row: LedgerRow, source: Source, family: Family, machine: Machine, kernel: str | None) -> LedgerJob | Unusable:
    """The job of a row in which nothing is open."""
    tp = row.tp or 1
    pp = row.pp or 1
    dp = row.dp or 1
    cp = row.cp or 1
    vpp = row.vpp or 1
    heads = row.heads or 1
    layers = row.layers or 1
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
        (sharded and pp > 1, "sharded weights in a pipeline are not priced"),
    ):
        if wrong:
            return Unusable(reason)
    hidden = row.hidden or 0
    module: dict[str, Any] = {
        "role": Role.LLM.value,
        "source": "",
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
    settings: dict[str, Any] = {**source.framework, **(source.pipelined if pp > 1 else {})}
    settings["distributed_optimizer"] = not zero.startswith("0")
    settings["sequence_parallel"] = tp > 1 and row.sequence_parallel is not False
    settings["attention_kernel"] = kernel
    settings["norm_kernel"] = row.rmsnorm_kernel or FUSED
    if row.grad_dtype:
        settings["grad_dtype"] = row.grad_dtype
    group = GROUP.search(zero)
    return LedgerJob(
        tuple(module.items()),
        family.causal,
        family.outputs,
        machine,
        row.gpus or 0,
        row.seq_len or 0,
        tp,
        cp,
        pp,
        dp,
        vpp,
        row.microbatch_size or 0,
        share,
        _recomputed(row.recompute, layers, pp),
        EAGER in row.attention_kernel.lower(),
        family.dropout,
        sharded,
        LedgerOptions(**settings, optimizer_ranks=int(group[1]) if group else 0),
    )


def _recomputed(said: str, layers: int, pp: int) -> int:
    """Blocks of each stage that are recomputed: all, some, or none.

    Recomputing attention alone costs next to nothing with kernels that keep no scores, and counts as none.
    """
    if some := SOME_LAYERS.fullmatch(said):
        return int(some[1]) if some[2] else -(-int(some[1]) // pp)
    return layers if said.startswith("full") else 0
