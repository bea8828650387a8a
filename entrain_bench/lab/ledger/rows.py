"""Rows of the ledger: published runs, one CSV a source, all with the same columns (``experiments/ledger``)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from entrain_bench.base.errors import UserError, unknown_choice

OK, OOM, ERROR = OUTCOMES = ("ok", "oom", "error")
# A sequence length that is a limit: shorter ones exist.
AT_MOST = "<="
TRUTHS = {"true": True, "false": False}
# Columns of the tables that no prediction reads.
NOTES = ("params_b", "grad_accum", "tflops_per_gpu", "hfu_pct", "mfu_pct", "where", "how")


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A published run; None or an empty text is what its source does not say.

    Attributes:
        source: name of its table, without ``.csv``.
        line: line of that file, the header being line 1.
        seq_len: tokens of a sequence; of shorter ones, too, if ``seq_at_most``.
        dp: replicas, GPUs / (TP x PP x CP).
        vpp: virtual stages of a rank.
        microbatch_size, global_batch: sequences.
        step_time_s, samples_per_s, tokens_per_s_per_gpu, tokens_per_s_total: what was measured.
        peak_memory_gib: highest memory of a GPU, in GiB.
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
        if self.step_time_s is not None:
            return self.step_time_s
        if self.global_batch is None:
            return None
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
    """All rows of a table.

    Args:
        path: a CSV with a header of ``COLUMNS``, in any order. Columns may be absent, as if empty in every row.

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
    return tuple(_parsed(path, reader))


def _parsed(path: Path, reader: csv.DictReader[str]) -> Iterator[LedgerRow]:
    line = 2
    for values in reader:
        if None in values.values() or "" in values:
            raise UserError(f"{path.name}:{line}: must have {len(reader.fieldnames or ())} fields, as the header has")
        yield parse_row(path.stem, line, values)
        line = reader.line_num + 1


def parse_row(source: str, line: int, values: Mapping[str, str]) -> LedgerRow:
    """A row from its texts by column; ``UserError`` names file, line and field."""
    parsed: dict[str, Any] = {}
    for name in READ:
        text = (values.get(name) or "").strip()
        if name == "seq_len" and text.startswith(AT_MOST):
            parsed["seq_at_most"] = True
            text = text.removeprefix(AT_MOST).strip()
        parsed[name] = _value(_HINTS[name], text, f"{source}.csv:{line}: {name}")
    if parsed["outcome"] not in OUTCOMES:
        raise unknown_choice(f"{source}.csv:{line}: outcome", parsed["outcome"], OUTCOMES)
    return LedgerRow(source, line, **parsed)


def _value(hint: Any, text: str, where: str) -> object:
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    if kinds == [str]:
        return text
    if not text:
        return None
    if kinds == [bool]:
        if text.lower() not in TRUTHS:
            raise UserError(f"{where}={text}: must be {', '.join(TRUTHS)} or empty")
        return TRUTHS[text.lower()]
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    whole = kinds == [int]
    if not isfinite(number) or number <= 0 or (whole and number != int(number)):
        raise UserError(f"{where}={text}: must be {'a positive integer' if whole else 'a positive number'} or empty")
    return int(number) if whole else number
