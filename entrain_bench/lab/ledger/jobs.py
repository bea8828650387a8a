"""Rows of the ledger, published runs (``experiments/ledger``), and the jobs that they may have been.

``experiments/ledger.yaml`` holds what all rows of a source share, and what widths do not say of a model.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from itertools import product
from math import gcd, isfinite
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import yaml

from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.config.tree import config_tree
from entrain_bench.specs.cluster import FLASH1, FLASH2, FLASH3, UNFUSED
from entrain_bench.specs.framework import GRAD_DTYPES, FrameworkOptions
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.module_layers import ModuleConfig, Role
from entrain_bench.specs.parse import parse

OK, OOM, ERROR = OUTCOMES = ("ok", "oom", "error")
# A sequence length that is a limit: shorter ones exist.
AT_MOST = "<="
TRUTHS = {"true": True, "false": False}
# Columns of the tables that no prediction reads.
NOTES = ("params_b", "grad_accum", "tflops_per_gpu", "hfu_pct", "mfu_pct", "where", "how")
# The table of measurements that are not in the book: users' own.
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
# What `zero_stage` says after its number: the ranks that share out optimizer states.
GROUP = re.compile(r"over (\d+)")
# What `recompute` says of some layers: how many, of all or of each stage.
SOME_LAYERS = re.compile(r"full on (\d+)( \* pp)? layers")
# Kernels of what is neither a product nor attention.
FUSED, EAGER = ("fused", "eager")
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
class LedgerRow:
    """A published run; None or an empty text is what its source does not say.

    Attributes:
        source, line: name of its table, without ``.csv``, and line of that file, the header being line 1.
        seq_len: tokens of a sequence; of shorter ones, too, if ``seq_at_most``.
        dp: replicas, GPUs / (TP x PP x CP).
        vpp: virtual stages of a rank.
        microbatch_size, global_batch: sequences.
        outcome: ``ok``, ``oom`` or ``error``.
    """

    source: str
    line: int
    release: str
    model: str
    hidden: int | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    ffn: int | None
    vocab: int | None
    seq_len: int | None
    gpus: int | None
    gpu_type: str
    tp: int | None
    pp: int | None
    dp: int | None
    cp: int | None
    vpp: int | None
    ep: int | None
    fsdp: str
    microbatch_size: int | None
    global_batch: int | None
    sequence_parallel: bool | None
    recompute: str
    attention_kernel: str
    rmsnorm_kernel: str
    zero_stage: str
    dtype: str
    grad_dtype: str
    software: str
    task: str
    step_time_s: float | None
    samples_per_s: float | None
    tokens_per_s_per_gpu: float | None
    tokens_per_s_total: float | None
    peak_memory_gib: float | None
    outcome: str
    note: str
    seq_at_most: bool = False

    @property
    def published_s(self) -> float | None:
        """Seconds of an iteration, as printed or by the throughput; None if the row times none."""
        if self.step_time_s is not None or self.global_batch is None:
            return self.step_time_s
        if self.samples_per_s is not None:
            return self.global_batch / self.samples_per_s
        if self.seq_len is None or self.seq_at_most:
            return None
        total = self.tokens_per_s_total
        if total is None and self.tokens_per_s_per_gpu is not None and self.gpus is not None:
            total = self.tokens_per_s_per_gpu * self.gpus
        return None if total is None else self.global_batch * self.seq_len / total


READ = tuple(field.name for field in fields(LedgerRow) if field.name not in ("source", "line", "seq_at_most"))
COLUMNS = (*READ, *NOTES)
_HINTS = get_type_hints(LedgerRow)


def read_rows(path: Path) -> tuple[LedgerRow, ...]:
    """All rows of a table, a CSV with columns of ``COLUMNS``; an absent column is empty in every row.

    Raises:
        UserError: naming file, line and field.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"ledger={path}: must be a CSV file that can be read ({type(error).__name__})") from None
    reader = csv.DictReader(text.splitlines(keepends=True), restkey="", restval=None)
    for name in reader.fieldnames or ():
        if name not in COLUMNS:
            raise unknown_choice(f"{path.name}:1: column", name, COLUMNS)
    if not reader.fieldnames:
        raise UserError(f"{path.name}: must have a header with columns of experiments/ledger")
    return tuple(_rows(path, reader))


def _rows(path: Path, reader: csv.DictReader[str]) -> Iterator[LedgerRow]:
    line = 2
    for values in reader:
        if None in values.values() or "" in values:
            raise UserError(f"{path.name}:{line}: must have {len(reader.fieldnames or ())} fields, as the header has")
        yield parse_row(path.stem, line, values)
        line = reader.line_num + 1


def parse_row(source: str, line: int, values: Mapping[str, str]) -> LedgerRow:
    """A row from its texts by column; ``UserError`` names file, line and field."""
    texts = {name: (values.get(name) or "").strip() for name in READ}
    at_most = texts["seq_len"].startswith(AT_MOST)
    texts["seq_len"] = texts["seq_len"].removeprefix(AT_MOST).strip()
    parsed = {name: _value(_HINTS[name], text, f"{source}.csv:{line}: {name}") for name, text in texts.items()}
    if parsed["outcome"] not in OUTCOMES:
        raise unknown_choice(f"{source}.csv:{line}: outcome", parsed["outcome"], OUTCOMES)
    return LedgerRow(source, line, **parsed, seq_at_most=at_most)


def _value(hint: Any, text: str, where: str) -> Any:
    if hint is str:
        return text
    if not text:
        return None
    (kind,) = (kind for kind in get_args(hint) if kind is not NoneType)
    if kind is bool:
        if text.lower() not in TRUTHS:
            raise UserError(f"{where}={text}: must be {', '.join(TRUTHS)} or empty")
        return TRUTHS[text.lower()]
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not isfinite(number) or number <= 0 or (kind is int and number != int(number)):
        allowed = "a positive integer" if kind is int else "a positive number"
        raise UserError(f"{where}={text}: must be {allowed} or empty")
    return kind(number)


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose name has one of ``words`` (in lower case): fields of ``ModuleConfig``, or why none is priced.

    ``kernels``, fused or eager, are those of a row that says nothing else.
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


@dataclass(frozen=True, slots=True)
class Book:
    """How rows become jobs; ``products``: devices by the types of GPU of published products."""

    families: tuple[Family, ...]
    sources: Mapping[str, Source]
    products: Mapping[str, str]

    def source(self, row: LedgerRow) -> Source:
        """Return the settings of a row's table and release; of an unknown table, those of users' own tables."""
        source = self.sources.get(row.source, self.sources[USERS])
        changes = (changes for start, changes in source.releases.items() if row.release.startswith(start))
        return replace(source, **next(changes, {}))

    def family(self, model: str) -> Family:
        """The first family with a word in a model's name."""
        known = (family for family in self.families if any(word in model.lower() for word in family.words))
        return next(known, Family((), "architecture is not known"))

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
        kernels: of norms and dropout in blocks, fused or eager.
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
        machine, gpus: its device and nodes, and the number of devices.
        sequence_tokens: of every sequence.
        tp, cp, pp, dp, vpp: degrees; ``pp`` counts the ranks of a pipeline, each with ``vpp`` virtual stages.
        microbatch_size: sequences.
        num_microbatches: of a replica, in an iteration.
        recompute: blocks of a stage that are recomputed in backward, at most.
        sharded: whether weights are sharded over replicas (ZeRO-3, FSDP).
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


def jobs_for(row: LedgerRow, book: Book) -> tuple[LedgerJob, ...]:
    """The jobs that a row may have been: one, or as many as what it leaves open allows.

    Raises:
        UserError: why there is none. Nothing is guessed where a needed size is missing, or is not priced.
    """
    source = book.source(row)
    family = book.family(row.model)
    row, opened = _completed(row, source)
    needed = [*NEEDED, *(["sequence_parallel"] if row.tp != 1 else []), *(["vpp"] if row.pp != 1 else [])]
    missing = [name for name in needed if getattr(row, name) in (None, "") and name not in opened]
    dtype = row.dtype.lower()
    _refuse(
        ("same value as in" in row.note, "repeats a value of an older release"),
        (row.outcome == ERROR, "ended with an error other than memory"),
        (row.outcome == OK and not (row.published_s or row.peak_memory_gib), "neither time nor memory is stated"),
        (any(word in dtype for word in FLOAT8), "8-bit or 4-bit numbers are not priced"),
        (dtype.startswith("fp32"), "fp32 is not priced"),
        (not dtype.startswith(HALF_PRECISION), "number format is not stated"),
        (bool(family.skip), family.skip),
        ((row.ep or 1) > 1, "mixture of experts, or hybrid"),
        (any(word in row.task.lower() for word in ("lora", "peft")), "low-rank adapters are not priced"),
        (not source.machines(row.gpu_type), "device has no constants"),
        (bool(missing), f"not stated: {', '.join(missing)}"),
        (row.seq_at_most, "lengths of samples are not stated"),
        ("pytorch" in row.attention_kernel.lower(), "attention of single operators is not priced"),
    )
    kernels = next(generations for word, generations in ATTENTION.items() if word in row.attention_kernel.lower())
    choices = [[(name, value) for value in values] for name, values in opened.items()]
    jobs: dict[LedgerJob, None] = {}
    reasons = list[UserError]()
    for machine, kernel, *chosen in product(source.machines(row.gpu_type), kernels, *choices):
        try:
            jobs[_job(replace(row, **dict(chosen)), source, family, machine, kernel)] = None
        except UserError as error:
            reasons.append(error)
    if not jobs:
        raise reasons[0]
    return tuple(jobs)


def _refuse(*reasons: tuple[bool, str]) -> None:
    """Raise ``UserError`` with the first reason that applies."""
    for applies, reason in reasons:
        if applies:
            raise UserError(reason)


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


def _job(row: LedgerRow, source: Source, family: Family, machine: Machine, kernel: str | None) -> LedgerJob:
    """The job of a row in which nothing is open."""
    tp, pp, dp, cp, vpp = ((getattr(row, name) or 1) for name in ("tp", "pp", "dp", "cp", "vpp"))
    heads = row.heads or 1
    hidden = row.hidden or 0
    layers = row.layers or 1
    share, rest = divmod((row.global_batch or 0), dp * (row.microbatch_size or 1))
    ffn = row.ffn or (0 if family.model.get("gated_mlp") else USUAL_FFN * hidden)
    zero = row.zero_stage.strip()
    sharded = zero.startswith("3") or row.fsdp.lower() == "true"
    _refuse(
        (not ffn, "not stated: ffn"),
        (row.gpus != tp * pp * dp * cp, "GPUs are not TP x PP x DP x CP"),
        (bool(rest) or not share, "batch is no multiple of DP x microbatch"),
        (bool(heads % tp or ffn % tp), "heads or feed-forward width do not divide by TP"),
        (layers < pp * vpp, "fewer layers than stages"),
        (vpp > 1 and bool(share % pp), "microbatches do not divide by PP, as interleaving needs it"),
        (zero.startswith("2"), "gradients sharded in every micro-step (ZeRO-2) are not priced"),
        (sharded and pp > 1, "sharded weights in a pipeline are not priced"),
    )
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
    group = GROUP.search(zero)
    settings: dict[str, Any] = {
        **source.framework,
        **(source.pipelined if pp > 1 else {}),
        "distributed_optimizer": not zero.startswith("0"),
        "sequence_parallel": tp > 1 and row.sequence_parallel is not False,
        "attention_kernel": kernel,
        "kernels": EAGER if row.rmsnorm_kernel == "unfused" else family.kernels,
        **({"grad_dtype": row.grad_dtype} if row.grad_dtype else {}),
        "optimizer_ranks": int(group[1]) if group else 0,
    }
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
        framework=LedgerOptions(**settings),
    )


def _recomputed(said: str, layers: int, pp: int) -> int:
    """Blocks of each stage that are recomputed: all, some, or none.

    Recomputing attention alone costs next to nothing with kernels that keep no scores, and counts as none.
    """
    if some := SOME_LAYERS.fullmatch(said):
        return int(some[1]) if some[2] else -(-int(some[1]) // pp)
    return layers if said.startswith("full") else 0
