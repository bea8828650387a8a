"""Rows of the ledger, published runs (``experiments/ledger``), and the jobs that they may have been.

``experiments/ledger.yaml`` holds values that all rows of a source share, and values of models beyond widths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.config.tree import config_tree
from entrain_bench.specs.cluster import FLASH1, FLASH2, FLASH3, UNFUSED
from entrain_bench.specs.framework import BF16, FP8, FP8_BLOCK, GRAD_DTYPES, FrameworkOptions
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.module_layers import Experts, LatentAttention, ModuleConfig, Role
from entrain_bench.specs.parse import parse

OK, OOM, ERROR = OUTCOMES = ("ok", "oom", "error")
# A sequence length that is a limit: shorter ones exist.
AT_MOST = "<="
TEXTS = (
    *("release", "model", "gpu_type", "fsdp", "recompute", "attention_kernel", "rmsnorm_kernel", "zero_stage"),
    *("dtype", "grad_dtype", "software", "task", "note", "outcome", "encoder"),
)
COUNTS = (
    *("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq_len", "gpus", "tp", "pp", "dp", "cp", "vpp", "ep"),
    *("microbatch_size", "global_batch", "item_tokens", "projected_tokens", "items"),
)
RATES = ("step_time_s", "samples_per_s", "tokens_per_s_per_gpu", "tokens_per_s_total", "peak_memory_gib")
# Columns of the tables that no prediction reads.
NOTES = ("params_b", "grad_accum", "packing", "tflops_per_gpu", "hfu_pct", "mfu_pct", "where", "how")
COLUMNS = (*TEXTS, *COUNTS, "sequence_parallel", *RATES, *NOTES)
# The table of measurements that are not in the book: users' own.
USERS = "own"
# Without these there is no job; feed-forward width and key-value heads have usual values.
NEEDED = (
    *("hidden", "layers", "heads", "vocab", "seq_len", "gpus", "tp", "pp", "dp", "cp"),
    *("microbatch_size", "global_batch", "recompute", "zero_stage"),
)
# 8-bit numbers by the start of `dtype`; MXFP8 has a scale for 32 values.
FLOAT8 = {"fp8-mx": FP8_BLOCK, "fp8": FP8, "mxfp8": FP8_BLOCK}
UNPRICED = ("nvfp4", "int4", "int8")
# Ranks that share out optimizer states, stated in `zero_stage` after its number.
GROUP = re.compile(r"over (\d+)")
# Number of layers in `recompute`, of all or of each stage.
SOME_LAYERS = re.compile(r"full on (\d+)( \* pp)? layers")
# Kernels of operators other than products and attention.
FUSED, EAGER = ("fused", "eager")
# Kinds of models, by which errors are stated apart.
TEXT_ALONE = "text, dense"
MIXTURE = "text, experts"
MULTIMODAL = "with an encoder"
# Texts of `recompute` that cost next to nothing.
UNREMADE = ("none", "none (no flag)", "selective", "selective (core_attn)")
# Generations of attention kernels by the first of these texts in `attention_kernel`. A family's name means any of its
# generations, an empty text the device's own.
ATTENTION: Mapping[str, tuple[str | None, ...]] = {
    "flashattention 3": (FLASH3,),
    "flashattention 2": (FLASH2,),
    "flashattention 1": (FLASH1,),
    "flashattention": (FLASH1, FLASH2),
    "softmax": (UNFUSED,),
    "unfused": (UNFUSED,),
    "": (None,),
}


# A published run: a named tuple of the columns below, None or an empty text where its source does not say. Besides:
# ``source`` is its table, ``line`` that of the file, ``published_s`` seconds of an iteration as printed or by the
# throughput, ``seq_at_most`` whether there are sequences of fewer tokens than ``seq_len``.
type LedgerRow = Any


def read_rows(path: Path) -> list[LedgerRow]:
    """All rows of a table, a CSV with columns of ``COLUMNS``; an absent column is empty in every row.

    ``UserError`` names file, line and field.
    """
    try:
        table = pd.read_csv(path, dtype=str, index_col=False, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise UserError(f"ledger={path}: must be a CSV file that can be read ({type(error).__name__})") from None
    for name in table.columns:
        if name not in COLUMNS:
            raise unknown_choice(f"{path.name}:1: column", name, COLUMNS)
    return parse_rows(path.stem, table)


def parse_rows(source: str, texts: pd.DataFrame) -> list[LedgerRow]:
    """Rows from their texts by column; ``UserError`` names file, line and field."""

    def check(name: str, fits: pd.Series, allowed: str) -> None:
        for place in np.flatnonzero(~fits)[:1].tolist():
            raise UserError(f"{source}.csv:{place + 2}: {name}={texts[name].iloc[place]}: must be {allowed}")

    texts = texts.reindex(columns=COLUMNS, fill_value="").fillna("").apply(lambda column: column.str.strip())
    check("outcome", texts["outcome"].isin(OUTCOMES), f"one of {', '.join(OUTCOMES)}")
    flags = {"": None, "true": True, "false": False}
    at_most = texts["seq_len"].str.startswith(AT_MOST)
    rows = texts[[*TEXTS]].assign(source=source, line=range(2, len(texts) + 2), seq_at_most=at_most)
    lowered = texts["sequence_parallel"].str.lower()
    check("sequence_parallel", lowered.isin(flags), "true, false or empty")
    rows["sequence_parallel"] = pd.Series([flags[text] for text in lowered], rows.index, object)
    for name in (*COUNTS, *RATES):
        plain = texts[name].str.removeprefix(AT_MOST if name == "seq_len" else "").str.strip()
        numbers = pd.to_numeric(plain, errors="coerce")
        whole = name in COUNTS
        fits = (numbers > 0) & (numbers < np.inf) & ((numbers % 1 == 0) | (not whole))
        check(name, fits | (plain == ""), f"a positive {'integer' if whole else 'number'} or empty")
        rows[name] = numbers
    totals = rows["tokens_per_s_total"].fillna(rows["tokens_per_s_per_gpu"] * rows["gpus"])
    by_tokens = rows["global_batch"] * rows["seq_len"].mask(at_most) / totals
    seconds = rows["step_time_s"].fillna(rows["global_batch"] / rows["samples_per_s"]).fillna(by_tokens)
    rows["published_s"] = seconds
    for name in (*COUNTS, *RATES, "published_s"):
        kind = int if name in COUNTS else float
        values = [None if pd.isna(value) else kind(value) for value in rows[name]]
        rows[name] = pd.Series(values, rows.index, object)
    return [*rows.itertuples(index=False, name="LedgerRow")]


@dataclass(frozen=True, slots=True)
class Source:
    """The settings that all rows of a table share.

    Attributes:
        devices: machines that a type of GPU may be, by a pattern of the text in ``gpu_type``: each a choice of
            ``cluster``, and other bytes per second of its tiers (``bandwidth``).
        framework, pipelined: fields of ``FrameworkOptions``, and those of runs with a pipeline alone.
        given, open: values for empty columns, and candidates for empty columns.
        releases: replaced values of a release's rows, by the start of its name.
        fitted: whether constants are fitted to its rows.
        sets: the constant of its device that its dense rows set, so that none of them is held out.
        allocated: whether its memory is that of tensors alone, without the reserve of the allocator.
        untimed: text in the note of rows whose time is not that of usual runs.
    """

    name: str
    devices: Mapping[str, Any] = field(default_factory=dict)
    framework: Mapping[str, Any] = field(default_factory=dict)
    pipelined: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    open: Mapping[str, Any] = field(default_factory=dict)
    releases: Mapping[str, Any] = field(default_factory=dict)
    fitted: bool = True
    sets: str = ""
    allocated: bool = False
    untimed: str = ""


@dataclass(frozen=True, slots=True)
class Book:
    """How rows become jobs (``experiments/ledger.yaml``): families of models, sources by their table, encoders."""

    families: tuple[Mapping[str, Any], ...]
    sources: Mapping[str, Source]
    encoders: Mapping[str, ModuleConfig] = field(default_factory=dict)

    @property
    def tables(self) -> tuple[Path, ...]:
        """The committed tables."""
        return tuple(config_tree() / "ledger" / f"{name}.csv" for name in self.sources if name != USERS)


def load_book() -> Book:
    """The committed book."""
    values = yaml.safe_load((config_tree() / "ledger.yaml").read_text())
    sources = {name: Source(**source) for name, source in values["sources"].items()}
    encoders = {name: parse(ModuleConfig, config, f"encoders.{name}") for name, config in values["encoders"].items()}
    return Book(tuple(values["families"]), sources, encoders)


@dataclass(frozen=True)
class LedgerOptions(FrameworkOptions):
    """Framework settings of a published run; besides, ranks that share out optimizer states (0: all that may).

    ``kernels`` of norms and dropout in blocks are fused or eager.
    """

    optimizer_ranks: int = 0
    kernels: str = FUSED

    def optimizer_instances(self, module: ModuleSpec, copies: int) -> int:  # noqa: ARG002 - of every module
        """Copies of the sharded optimizer states among ``copies`` ranks that hold the same weights."""
        return copies // gcd(self.optimizer_ranks, copies) if self.optimizer_ranks else 1


class LedgerJob(NamedTuple):
    """A training run of a language model, perhaps with an encoder, as plain values: equal jobs have equal programs.

    ``module`` has fields of ``ModuleConfig``, ``bandwidth`` bytes per second of the cluster's tiers. A pipeline has
    ``pp`` ranks with ``vpp`` virtual stages each; a stage recomputes ``recompute`` blocks at most. ``sharded``: ZeRO-3.
    Every sample has ``items`` of ``item_tokens`` in the encoder and ``projected_tokens`` among those of its sequence.
    """

    module: tuple[tuple[str, Any], ...]
    cluster: str
    bandwidth: tuple[tuple[str, float], ...]
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
    ep: int = 1
    allocated: bool = False
    encoder: ModuleConfig | None = None
    item_tokens: int = 0
    projected_tokens: int = 0
    items: int = 0

    @property
    def kind(self) -> str:
        """Whether its model has an encoder or experts, and its products 8 bits."""
        model = MULTIMODAL if self.encoder else MIXTURE if self.config.experts else TEXT_ALONE
        return model if self.framework.precision == BF16 else f"{model}, 8 bits"

    @property
    def config(self) -> ModuleConfig:
        """The architecture of its model."""
        return ModuleConfig(**dict(self.module))


def jobs_for(row: LedgerRow, book: Book) -> list[LedgerJob]:
    """Return the jobs that a row may describe: one, or several if values are open.

    ``UserError`` says why there is none. No missing size is guessed.
    """
    source = book.sources.get(row.source, book.sources[USERS])
    changes = (changes for start, changes in source.releases.items() if row.release.startswith(start))
    source = replace(source, **next(changes, {}))
    suited = (machines for pattern, machines in source.devices.items() if fnmatchcase(row.gpu_type, pattern))
    machines: list[dict[str, Any]] = next(suited, [])
    known = (family for family in book.families if any(word in row.model.lower() for word in family["words"]))
    family: Mapping[str, Any] = next(known, {"skip": "architecture is not known"})
    row, opened = _completed(row, replace(source, given={**family.get("given", {}), **source.given}))
    experts = "experts" in family.get("model", {})
    needed = [*NEEDED, *(["sequence_parallel"] if row.tp != 1 else []), *(["vpp"] if row.pp != 1 else [])]
    needed += ["item_tokens", "projected_tokens", "items"] if row.encoder else []
    missing = [name for name in needed if getattr(row, name) in (None, "") and name not in opened]
    dtype = row.dtype.lower()
    attention = row.attention_kernel.lower()
    _refuse(
        ("same value as in" in row.note, "repeats a value of an older release"),
        (row.outcome == ERROR, "ended with an error other than memory"),
        (row.outcome == OK and not (row.published_s or row.peak_memory_gib), "neither time nor memory is stated"),
        (any(word in dtype for word in UNPRICED), "4-bit numbers and integers are not priced"),
        (dtype.startswith("fp32"), "fp32 is not priced"),
        (not dtype.startswith(("bf16", "fp16", *FLOAT8)), "number format is not stated"),
        ("skip" in family, family.get("skip", "")),
        ((row.ep or 1) > 1 and not experts, "mixture of experts, or hybrid"),
        (experts and not row.ep, "not stated: ep"),
        (experts and row.recompute not in (*UNREMADE, ""), "recomputation of parts of experts is not priced"),
        (any(word in row.task.lower() for word in ("lora", "peft")), "low-rank adapters are not priced"),
        (not machines, "device has no constants"),
        (bool(missing), f"not stated: {', '.join(missing)}"),
        (row.seq_at_most, "lengths of samples are not stated"),
        ("pytorch" in attention, "attention of single operators is not priced"),
    )
    kernels = next(generations for word, generations in ATTENTION.items() if word in attention)
    jobs = list[LedgerJob]()
    reasons = list[UserError]()
    for machine, kernel, *chosen in product(machines, kernels, *opened.values()):
        try:
            job = _job(row._replace(**dict(zip(opened, chosen, strict=True))), source, family, machine, kernel)
            jobs.append(_with_encoder(job, row, book) if row.encoder else job)
        except UserError as error:
            reasons.append(error)
    if not jobs:
        raise reasons[0]
    return [*dict.fromkeys(jobs)]


def _refuse(*reasons: tuple[bool, str]) -> None:
    """Raise ``UserError`` with the first reason that applies."""
    for applies, reason in reasons:
        if applies:
            raise UserError(reason)


def _completed(row: LedgerRow, source: Source) -> tuple[LedgerRow, dict[str, Any]]:
    """Return the row with its source's values, and candidates for its other empty columns."""
    empty = {name for name in (*source.given, *source.open) if getattr(row, name) in (None, "")}
    given = {name: value for name, value in source.given.items() if name in empty}
    opened = {name: values for name, values in source.open.items() if name in empty - {*given}}
    if not row.grad_dtype and "grad_dtype" not in source.framework:
        opened["grad_dtype"] = GRAD_DTYPES
    for name, needed in (("sequence_parallel", row.tp != 1), ("vpp", row.pp != 1)):
        if not needed:
            opened.pop(name, None)
    return row._replace(**given), opened


def _job(
    row: LedgerRow, source: Source, family: Mapping[str, Any], machine: Mapping[str, Any], kernel: str | None
) -> LedgerJob:
    """The job of a row in which nothing is open."""
    vpp = row.vpp or 1
    share, rest = divmod(row.global_batch, row.dp * row.microbatch_size)
    model = family.get("model", {})
    # The usual width of a block without a gate.
    ffn = row.ffn or (0 if model.get("gated_mlp") else 4 * row.hidden)
    zero = row.zero_stage.strip()
    sharded = zero.startswith("3") or row.fsdp.lower() == "true"
    _refuse(
        (not ffn, "not stated: ffn"),
        (row.gpus != row.tp * row.pp * row.dp * row.cp, "GPUs are not TP x PP x DP x CP"),
        (bool(rest) or not share, "batch is no multiple of DP x microbatch"),
        (bool(row.heads % row.tp or ffn % row.tp), "heads or feed-forward width do not divide by TP"),
        (row.layers < row.pp * vpp, "fewer layers than stages"),
        (vpp > 1 and bool(share % row.pp), "microbatches do not divide by PP, as interleaving needs it"),
        (zero.startswith("2"), "gradients sharded in every micro-step (ZeRO-2) are not priced"),
        (sharded and row.pp > 1, "sharded weights in a pipeline are not priced"),
    )
    module: dict[str, Any] = {
        "role": Role.LLM.value,
        "source": "",
        "num_layers": row.layers,
        "hidden_size": row.hidden,
        "num_heads": row.heads,
        "num_kv_heads": row.kv_heads or row.heads,
        "head_dim": row.hidden // row.heads,
        "ffn_hidden_size": ffn,
        "vocab_size": row.vocab,
        "context_tokens": row.seq_len,
        **model,
    }
    if (experts := model.get("experts")) is not None:
        # A row that states the width of experts states no other one.
        module["experts"] = parse(Experts, {"ffn_hidden_size": ffn, **experts}, "experts")
        module["latent"] = parse(LatentAttention, model["latent"], "latent") if "latent" in model else None
        copies = row.dp * row.cp
        fits = copies % row.ep == 0 and module["experts"].count % row.ep == 0
        _refuse((not fits, "EP divides neither experts nor DP x CP"), (sharded, "sharded experts are not priced"))
    group = GROUP.search(zero)
    settings: dict[str, Any] = {
        **source.framework,
        **(source.pipelined if row.pp > 1 else {}),
        "distributed_optimizer": not zero.startswith("0"),
        "sequence_parallel": row.tp > 1 and row.sequence_parallel is not False,
        "attention_kernel": kernel,
        "precision": next((name for word, name in FLOAT8.items() if row.dtype.lower().startswith(word)), BF16),
        "kernels": EAGER if row.rmsnorm_kernel == "unfused" else family.get("kernels", FUSED),
        **({"grad_dtype": row.grad_dtype} if row.grad_dtype else {}),
        "optimizer_ranks": int(group[1]) if group else 0,
    }
    return LedgerJob(
        tuple(module.items()),
        machine["cluster"],
        tuple(machine.get("bandwidth", {}).items()),
        *(row.gpus, row.seq_len, row.tp, row.cp, row.pp, row.dp, vpp, row.microbatch_size, share),
        _recomputed(row.recompute, row.layers, row.pp),
        sharded,
        LedgerOptions(**settings),
        row.ep or 1,
        source.allocated,
    )


def _with_encoder(job: LedgerJob, row: LedgerRow, book: Book) -> LedgerJob:
    """The job with the encoder of its row, as Megatron-LM runs it: whole, on the ranks of the LLM's first stage."""
    _refuse(
        (row.encoder not in book.encoders, "sizes of its encoder are not stated"),
        (job.vpp > 1, "virtual stages have no place for an encoder"),
        (row.items * row.projected_tokens >= row.seq_len, "items have more tokens than a sequence"),
    )
    return job._replace(
        framework=replace(job.framework, encoder_sp=False, encoder_cp=False),
        encoder=book.encoders[row.encoder],
        item_tokens=row.item_tokens,
        projected_tokens=row.projected_tokens,
        items=row.items,
    )


def _recomputed(said: str, layers: int, pp: int) -> int:
    """Blocks of each stage that are recomputed: all, some, or none.

    Recomputing attention alone costs next to nothing with kernels that keep no scores, and counts as none.
    """
    if some := SOME_LAYERS.fullmatch(said):
        return int(some[1]) if some[2] else -(-int(some[1]) // pp)
    return layers if said.startswith("full") else 0
