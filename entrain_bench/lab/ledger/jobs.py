"""From a row of the ledger to the jobs that it may have been, or the reason why none is priced.

``experiments/ledger.yaml`` holds what all rows of a source share, and what widths do not say of a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.config.tree import config_tree
from entrain_bench.lab.ledger.rows import ERROR, OK, LedgerRow
from entrain_bench.specs.cluster import FLASH1, FLASH2, FLASH3, UNFUSED
from entrain_bench.specs.framework import GRAD_DTYPES, FrameworkOptions
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.module_layers import ModuleConfig, Role
from entrain_bench.specs.parse import parse

# What is said of tables that are not in the book: users' own measurements.
USERS = "own"
# Without these there is no job; feed-forward width and key-value heads have usual values.
NEEDED = (
    *("hidden", "layers", "heads", "vocab", "seq_len", "gpus", "tp", "pp", "dp", "cp"),
    *("microbatch_size", "global_batch", "recompute", "zero_stage"),
)
# Feed-forward width of a block without a gate, in hidden sizes.
USUAL_FFN = 4
HALF_PRECISION = ("bf16", "fp16")
FLOAT8 = ("fp8", "mxfp8", "nvfp4", "float8", "int4", "int8")
# Words of `note` and of `attention_kernel`.
REPEATED = "same value as in"
SINGLE_OPERATORS = "pytorch"
# What `zero_stage` says after its number: the ranks that share out optimizer states.
GROUP = re.compile(r"over (\d+)")
# What `recompute` says of some layers: how many, of all or of each stage.
SOME_LAYERS = re.compile(r"full on (\d+)( \* pp)? layers")
# Kernels of what is neither a product nor attention; what `rmsnorm_kernel` says of the second.
FUSED, EAGER = KERNELS = ("fused", "eager")
SINGLE_NORMS = "unfused"
# Generations of attention kernels by what `attention_kernel` says, the first that is in it: any of a family where that
# alone is named, the device's own where nothing is said.
ATTENTION: Mapping[str, tuple[str | None, ...]] = {
    "flashattention 3": (FLASH3,),
    "flashattention 2": (FLASH2,),
    "flashattention 1": (FLASH1,),
    "flashattention": (FLASH1, FLASH2),
    "softmax": (UNFUSED,),
    "unfused": (UNFUSED,),
    "": (None,),
}


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose name has one of ``words`` (in lower case): fields of ``ModuleConfig``, or why none is priced.

    ``kernels`` is one of ``KERNELS``, of a row that says nothing else.
    """

    words: tuple[str, ...]
    skip: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    kernels: str = FUSED


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that a source's type of GPU may be: a choice of cluster, with other bytes per second of tiers."""

    cluster: str
    bandwidth: Mapping[str, float] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.cluster, *self.bandwidth.items()))


@dataclass(frozen=True, slots=True)
class Source:
    """The settings that all rows of a table share.

    Attributes:
        name: in tables and figures.
        devices: machines that a type of GPU may be, by a pattern of the text in ``gpu_type``.
        framework: fields of ``FrameworkOptions``.
        pipelined: likewise, of runs with a pipeline alone.
        given: values for empty columns.
        open: what an empty column may be.
        releases: what rows of a release have instead, by how its name begins.
    """

    name: str
    devices: Mapping[str, Any] = field(default_factory=dict)
    framework: Mapping[str, Any] = field(default_factory=dict)
    pipelined: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    open: Mapping[str, Any] = field(default_factory=dict)
    releases: Mapping[str, Any] = field(default_factory=dict)

    def machines(self, gpu_type: str) -> tuple[Machine, ...]:
        """The machines of a type of GPU: those of the first pattern that it matches; none if it matches none."""
        matching = (machines for pattern, machines in self.devices.items() if fnmatchcase(gpu_type, pattern))
        return tuple(parse(Machine, machine, gpu_type) for machine in next(matching, ()))

    def at(self, release: str) -> Source:
        """Return the settings that rows of a release share."""
        matching = (changes for start, changes in self.releases.items() if release.startswith(start))
        return replace(self, **next(matching, {}))


@dataclass(frozen=True, slots=True)
class Book:
    """How rows become jobs; ``products``: devices by the types of GPU of published products."""

    families: tuple[Family, ...]
    sources: Mapping[str, Source]
    products: Mapping[str, str]

    def source(self, row: LedgerRow) -> Source:
        """Return the settings of a row's table and release; of an unknown table, those of users' own tables."""
        return self.sources.get(row.source, self.sources[USERS]).at(row.release)

    def family(self, model: str) -> Family | None:
        """The first family with a word in a model's name; None if there is none."""
        name = model.lower()
        return next((family for family in self.families if any(word in name for word in family.words)), None)

    @property
    def tables(self) -> tuple[Path, ...]:
        """The committed tables."""
        return tuple(config_tree() / "ledger" / f"{name}.csv" for name in self.sources if name != USERS)


def load_book() -> Book:
    """The committed book."""
    path = config_tree() / "ledger.yaml"
    values = yaml.safe_load(path.read_text())
    families = tuple(parse(Family, family, f"{path.name}: families") for family in values["families"])
    sources = {name: parse(Source, source, f"{path.name}: {name}") for name, source in values["sources"].items()}
    return Book(families, sources, values["products"])


@dataclass(frozen=True)
class LedgerOptions(FrameworkOptions):
    """Framework settings of a published run.

    Attributes:
        optimizer_ranks: ranks that share out optimizer states; 0: all that may.
        kernels: of norms and dropout in blocks, one of ``KERNELS``.
    """

    optimizer_ranks: int = 0
    kernels: str = FUSED

    def optimizer_instances(self, module: ModuleSpec, copies: int) -> int:  # noqa: ARG002 - of every module
        """Copies of the sharded optimizer states among ``copies`` ranks that hold the same weights."""
        return copies // gcd(self.optimizer_ranks, copies) if self.optimizer_ranks else 1


@dataclass(frozen=True, slots=True)
class LedgerJob:
    """A training run of a language model, as plain values: equal jobs have equal programs.

    Attributes:
        module: fields of the language model's ``ModuleConfig``.
        machine: its device and nodes.
        gpus: how many.
        sequence_tokens: of every sequence.
        tp, cp, pp, dp, vpp: degrees; ``pp`` counts the ranks of a pipeline, each with ``vpp`` virtual stages.
        microbatch_size: sequences.
        num_microbatches: of a replica, in an iteration.
        recompute: blocks of a stage that are recomputed in backward, at most.
        sharded: whether weights are sharded over replicas (ZeRO-3, FSDP).
        framework: how the trainer runs it.
    """

    module: tuple[tuple[str, Any], ...]
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


def jobs_for(row: LedgerRow, book: Book) -> tuple[LedgerJob, ...] | Unusable:
    """The jobs that a row may have been: one, or as many as what it leaves open allows.

    Nothing is guessed: where a needed size is missing, or is something that the cost model does not price, there is a
    reason instead.
    """
    source = book.source(row)
    family = book.family(row.model)
    row, opened = _completed(row, source)
    reason = next(_reasons(row, source, family, opened), "")
    if reason or family is None:
        return Unusable(reason)
    kernels = next(generations for word, generations in ATTENTION.items() if word in row.attention_kernel.lower())
    choices = [[(name, value) for value in values] for name, values in opened.items()]
    jobs: dict[LedgerJob, None] = {}
    for machine, kernel, *chosen in product(source.machines(row.gpu_type), kernels, *choices):
        made = _job(replace(row, **dict(chosen)), source, family, machine, kernel)
        if isinstance(made, Unusable):
            reason = reason or made.reason
        else:
            jobs[made] = None
    return tuple(jobs) or Unusable(reason)


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


def _reasons(row: LedgerRow, source: Source, family: Family | None, opened: Mapping[str, Any]) -> Iterator[str]:
    """Reasons for there being no job, the first that counts first."""
    if REPEATED in row.note:
        yield "repeats a value of an older release"
    if row.outcome == ERROR:
        yield "ended with an error other than memory"
    if row.outcome == OK and row.published_s is None and row.peak_memory_gib is None:
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
    if SINGLE_OPERATORS in row.attention_kernel.lower():
        yield "attention of single operators is not priced"


def _job(row: LedgerRow, source: Source, family: Family, machine: Machine, kernel: str | None) -> LedgerJob | Unusable:
    """The job of a row in which nothing is open."""
    tp = row.tp or 1
    pp = row.pp or 1
    dp = row.dp or 1
    cp = row.cp or 1
    vpp = row.vpp or 1
    heads = row.heads or 1
    hidden = row.hidden or 0
    layers = row.layers or 1
    share, rest = divmod((row.global_batch or 0), dp * (row.microbatch_size or 1))
    ffn = row.ffn or (0 if family.model.get("gated_mlp") else USUAL_FFN * hidden)
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
    settings["kernels"] = EAGER if row.rmsnorm_kernel == SINGLE_NORMS else family.kernels
    if row.grad_dtype:
        settings["grad_dtype"] = row.grad_dtype
    group = GROUP.search(zero)
    return LedgerJob(
        module=tuple(module.items()),
        machine=machine,
        gpus=row.gpus or 0,
        sequence_tokens=row.seq_len or 0,
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        vpp=vpp,
        microbatch_size=row.microbatch_size or 0,
        num_microbatches=share,
        recompute=_recomputed(row.recompute, layers, pp),
        sharded=sharded,
        framework=LedgerOptions(**settings, optimizer_ranks=int(group[1]) if group else 0),
    )


def _recomputed(said: str, layers: int, pp: int) -> int:
    """Blocks of each stage that are recomputed: all, some, or none.

    Recomputing attention alone costs next to nothing with kernels that keep no scores, and counts as none.
    """
    if some := SOME_LAYERS.fullmatch(said):
        return int(some[1]) if some[2] else -(-int(some[1]) // pp)
    return layers if said.startswith("full") else 0
