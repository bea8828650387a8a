"""Rows of the ledger for tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from entrain_bench.config.compose import Composer
from entrain_bench.lab.ledger.fit import Constant, Ledger, with_constants
from entrain_bench.lab.ledger.jobs import LedgerRow, load_book, parse_rows
from entrain_bench.lab.ledger.predict import Change, Entry, case_maker, make_entries, predictor

# A run that states everything.
STATED = {
    "model": "LLaMA-1 13B",
    "hidden": "5120",
    "layers": "40",
    "heads": "40",
    "kv_heads": "40",
    "ffn": "13824",
    "vocab": "128000",
    "seq_len": "2048",
    "gpus": "64",
    "gpu_type": "A100-SXM-80GB",
    "tp": "2",
    "pp": "4",
    "dp": "8",
    "cp": "1",
    "vpp": "1",
    "microbatch_size": "2",
    "global_batch": "128",
    "sequence_parallel": "True",
    "recompute": "full",
    "dtype": "bf16",
    "zero_stage": "1",
    "step_time_s": "3.5",
    "outcome": "ok",
}


def stated_row(source: str = "internevo_a100", **changes: str) -> LedgerRow:
    """That run, with other texts in some columns."""
    (row,) = parse_rows(source, pd.DataFrame([STATED | changes]))
    return row


# Wide, so that products take most of the time.
WIDE = {"hidden": "8192", "layers": "4", "heads": "64", "kv_heads": "64", "ffn": "22016", "vocab": "32000"}
CONSTANTS = (Constant("device", "sustained_fraction", 0.8, 0.5, 0.0, "made up"),)
# 0.75 times the usual value.
MADE = with_constants(CONSTANTS, np.array([0.75]))
DEVICE = "A100-SXM-80GB"


def made_up_ledger(*offsets: float, change: Change | None = MADE) -> Ledger:
    """Sources whose times were made with a sustained fraction of 0.6, each off by a factor."""
    book = load_book()
    make = case_maker(Composer())
    predict = predictor(change)
    entries = list[Entry]()
    for number, offset in enumerate(offsets):
        layouts = [{"tp": "1", "pp": "1", "dp": "64"}, {"tp": "2", "pp": "1", "dp": "32"}]
        stated = [stated_row(f"lab{number}", **WIDE, peak_memory_gib="9", **layout) for layout in layouts]
        for found in make_entries(stated, book, make):
            # Of what a row leaves open one case, so that predictions are no ranges.
            entry = replace(found, cases=found.cases[:1])
            seconds, _ = entry.outcome(predict).seconds
            entries.append(replace(entry, row=entry.row._replace(published_s=seconds * offset)))
    return Ledger(tuple(entries))
