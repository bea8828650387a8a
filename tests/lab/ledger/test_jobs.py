"""From rows to jobs: what a row says, what it leaves open, and reasons for there being no job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrain_bench.lab.ledger.book import load_book
from entrain_bench.lab.ledger.jobs import LedgerJob, Unusable, jobs_of
from entrain_bench.lab.ledger.rows import LedgerRow, row_of
from support.ledger import STATED

BOOK = load_book()


def row(**changes: str) -> LedgerRow:
    return row_of("aleph_alpha_layouts_a100", 2, {**STATED, **changes})


def jobs(**changes: str) -> tuple[LedgerJob, ...]:
    found = jobs_of(row(**changes), BOOK)
    assert not isinstance(found, Unusable), found
    return found


def test_a_row_that_states_everything_is_one_job() -> None:
    (job,) = jobs()
    assert (job.tp, job.cp, job.pp, job.dp, job.vpp) == (2, 1, 4, 8, 1)
    assert (job.sequence_tokens, job.microbatch_size, job.num_microbatches) == (2048, 2, 8)
    assert job.recompute
    assert not job.sharded
    assert job.causal
    assert job.framework.sequence_parallel
    assert job.framework.distributed_optimizer
    assert not job.framework.overlap_grad_reduce
    assert job.config.gated_mlp
    assert job.config.head_dim == 128


def test_what_is_left_open_is_every_job_that_it_may_have_been() -> None:
    assert [job.framework.sequence_parallel for job in jobs(sequence_parallel="")] == [False, True]
    # Without tensor parallelism there is nothing to split.
    (job,) = jobs(sequence_parallel="", tp="1", dp="16")
    assert not job.framework.sequence_parallel


@pytest.mark.parametrize(("text", "expected"), [("0", False), ("1", True), ("1 over all data-parallel ranks", True)])
def test_optimizer_states_are_sharded_as_the_stage_says(text: str, expected: bool) -> None:
    (job,) = jobs(zero_stage=text)
    assert job.framework.distributed_optimizer is expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outcome": "error"}, "ended with an error"),
        ({"step_time_s": ""}, "neither time nor memory"),
        ({"dtype": "MXFP8"}, "8-bit or 4-bit"),
        ({"dtype": "fp32 (TF32 possible)"}, "fp32 is not priced"),
        ({"dtype": ""}, "number format is not stated"),
        ({"model": "Grok-1 314B"}, "mixture of experts"),
        ({"ep": "8"}, "mixture of experts"),
        ({"model": "something"}, "architecture is not known"),
        ({"task": "finetune LoRA"}, "low-rank adapters"),
        ({"gpu_type": "abacus"}, "device has no constants"),
        ({"microbatch_size": "", "vocab": ""}, "not stated: vocab, microbatch_size"),
        ({"ffn": ""}, "not stated: ffn"),
        ({"seq_len": "<= 2048"}, "lengths of samples"),
        ({"gpus": "32"}, "GPUs are not TP x PP x DP x CP"),
        ({"global_batch": "120"}, "batch is no multiple"),
        ({"heads": "39"}, "do not divide by TP"),
        ({"vpp": "11"}, "fewer layers than stages"),
        ({"vpp": "2", "global_batch": "96"}, "microbatches do not divide by PP"),
        ({"zero_stage": "2"}, "ZeRO-2"),
        ({"zero_stage": "1 over 8 GPUs"}, "over a few ranks"),
        ({"zero_stage": "3"}, "sharded weights in a pipeline"),
        ({"note": "same value as in v24.11"}, "repeats a value"),
    ],
)
def test_what_is_not_stated_or_not_priced_is_a_reason_and_no_guess(changes: dict[str, str], reason: str) -> None:
    found = jobs_of(row(**changes), BOOK)
    assert isinstance(found, Unusable)
    assert reason in found.reason


def test_rows_of_an_unknown_table_are_a_users_own() -> None:
    own: dict[str, Any] = {"source": "mine", "vpp": None, "cp": None, "zero_stage": ""}
    found = jobs_of(replace(row(), **own), BOOK)
    assert isinstance(found, tuple)
    assert found[0].framework.overlap_grad_reduce
    assert found[0].vpp == 1
