"""Rows of the ledger and their jobs: what a row says, what it leaves open, and reasons for there being no job."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.lab.ledger.jobs import LedgerJob, jobs_for, load_book, read_rows
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.module_layers import Experts, Role, build_layers
from support.ledger import stated_row

BOOK = load_book()


def jobs(source: str = "internevo_a100", **changes: str) -> list[LedgerJob]:
    return jobs_for(stated_row(source, **changes), BOOK)


def test_a_row_that_states_everything_is_one_job() -> None:
    (job,) = jobs()
    assert (job.tp, job.cp, job.pp, job.dp, job.vpp) == (2, 1, 4, 8, 1)
    assert (job.sequence_tokens, job.microbatch_size, job.num_microbatches) == (2048, 2, 8)
    assert job.recompute
    assert not job.sharded
    assert job.framework.sequence_parallel
    assert job.framework.distributed_optimizer
    assert not job.framework.overlap_param_gather
    assert job.framework.grad_dtype == "bf16"
    assert job.config.gated_mlp
    assert job.config.head_dim == 128


def test_experts_are_those_of_the_model_and_of_a_stated_width() -> None:
    (job,) = jobs(model="Mixtral 8x7B", ep="4", recompute="none")
    assert job.config.experts == Experts(count=8, top_k=2, ffn_hidden_size=13824)
    assert job.ep == 4
    # All widths are the model's where a row has its name alone.
    names = {"model": "deepseekv3_l4", "layers": "4", "tp": "1", "pp": "1", "dp": "8", "gpus": "8", "ep": "8"}
    empty = dict.fromkeys(("hidden", "heads", "kv_heads", "ffn", "vocab"), "")
    row = {**names, **empty, "recompute": "none", "gpu_type": "B200-SXM"}
    (job,) = jobs("simumax_b200", **row)
    assert (job.config.hidden_size, job.config.ffn_hidden_size, job.config.vocab_size) == (7168, 18432, 129280)
    # arXiv:2412.19437, section 4.2: 256 routed experts of 2,048 and a shared one, 8 a token.
    assert job.config.experts
    layers = build_layers(job.config)
    expert = 3 * 7168 * 2048
    assert [layer.expert_parameters for layer in layers[1:5]] == [0] + [256 * expert] * 3
    assert layers[2].idle_parameters == 248 * expert


@pytest.mark.parametrize(("dtype", "precision"), [("fp8", "fp8"), ("FP8-MX", "fp8_block"), ("MXFP8", "fp8_block")])
def test_numbers_of_8_bits_are_a_kind_of_their_own(dtype: str, precision: str) -> None:
    (job,) = jobs(dtype=dtype)
    assert (job.framework.precision, job.kind) == (precision, "text, dense, 8 bits")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"items": ""}, "not stated: items"),
        ({"encoder": "a tower"}, "sizes of its encoder are not stated"),
        ({"items": "4"}, "items have more tokens than a sequence"),
        ({"vpp": "2"}, "virtual stages have no place for an encoder"),
    ],
)
def test_an_encoder_needs_sizes_and_items(changes: dict[str, str], reason: str) -> None:
    seeing = {"encoder": "ViT of 12 layers, width 624", "item_tokens": "577", "projected_tokens": "577", "items": "1"}
    (job,) = jobs(**seeing)
    assert (job.items, job.item_tokens, job.framework.encoder_cp) == (1, 577, False)
    with pytest.raises(UserError, match=reason):
        jobs(**{**seeing, **changes})


def test_what_is_left_open_is_every_job_that_it_may_have_been() -> None:
    found = jobs("own", sequence_parallel="")
    seen = [(job.framework.sequence_parallel, job.framework.grad_dtype) for job in found]
    assert seen == [(False, "fp32"), (False, "bf16"), (True, "fp32"), (True, "bf16")]
    # Without tensor parallelism there is nothing to split.
    found = jobs("own", sequence_parallel="", tp="1", dp="16", grad_dtype="bf16")
    assert [job.framework.sequence_parallel for job in found] == [False]


@pytest.mark.parametrize(("text", "expected"), [("0", False), ("1", True), ("1 over all data-parallel ranks", True)])
def test_optimizer_states_are_sharded_as_the_stage_says(text: str, expected: bool) -> None:
    (job,) = jobs(zero_stage=text)
    assert job.framework.distributed_optimizer is expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outcome": "error"}, "ended with an error"),
        ({"step_time_s": ""}, "neither time nor memory"),
        ({"dtype": "NVFP4"}, "4-bit numbers"),
        ({"dtype": "fp32 (TF32 possible)"}, "fp32 is not priced"),
        ({"dtype": ""}, "number format is not stated"),
        ({"model": "Grok-1 314B"}, "not stated: ep"),
        ({"model": "Grok-1 314B", "ep": "16", "recompute": "none"}, "EP divides neither experts nor DP x CP"),
        ({"model": "Grok-1 314B", "ep": "8", "recompute": "full"}, "recomputation of parts of experts"),
        ({"model": "Moonlight 16B-A3B"}, "mixture of experts"),
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
        ({"zero_stage": "3"}, "sharded weights in a pipeline"),
        ({"attention_kernel": "PyTorch unfused"}, "attention of single operators"),
        ({"model": "T5 11B"}, "encoder and decoder"),
        ({"note": "same value as in v24.11"}, "repeats a value"),
    ],
)
def test_what_is_not_stated_or_not_priced_is_a_reason_and_no_guess(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        jobs(**changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention_kernel": "FlashAttention 2"}, [("flash2", "fused", 40)]),
        ({"attention_kernel": "FlashAttention 1.0.8"}, [("flash1", "fused", 40)]),
        # A version that is not stated may be any.
        (
            {"attention_kernel": "FlashAttention (version not stated)"},
            [("flash1", "fused", 40), ("flash2", "fused", 40)],
        ),
        ({"attention_kernel": "fused softmax (Megatron kernel)"}, [("unfused", "fused", 40)]),
        ({"rmsnorm_kernel": "unfused"}, [(None, "eager", 40)]),
        ({"model": "BERT large"}, [(None, "eager", 40)]),
        ({"recompute": "none"}, [(None, "fused", 0)]),
        ({"recompute": "selective (core attention)"}, [(None, "fused", 0)]),
        ({"recompute": "full on 5 layers"}, [(None, "fused", 2)]),
        ({"recompute": "full on 3 * pp layers"}, [(None, "fused", 3)]),
    ],
)
def test_kernels_and_recomputed_blocks_are_those_that_the_row_or_its_family_says(
    changes: dict[str, str], expected: list[tuple[str | None, str, int]]
) -> None:
    found = [(job.framework.attention_kernel, job.framework.kernels, job.recompute) for job in jobs(**changes)]
    assert found == expected


def test_a_few_ranks_may_share_out_optimizer_states() -> None:
    (job,) = jobs(zero_stage="1 over 4 GPUs")
    (whole,) = jobs()
    module = ModuleSpec("llm", Role.LLM, job.config, build_layers(job.config))
    assert [each.framework.optimizer_instances(module, 8) for each in (job, whole)] == [2, 1]


def test_rows_of_a_release_or_a_table_have_settings_of_their_own() -> None:
    releases = {"2021-04 (arXiv)": (False, False), "Megatron-Core 0.8.0 (2024-07)": (True, True)}
    for release, (overlaps, sharded) in releases.items():
        found = jobs("nvidia_megatron_lm", release=release, zero_stage="", sequence_parallel="false")
        assert found[0].framework.overlap_grad_reduce is overlaps
        assert found[0].framework.distributed_optimizer is sharded

    # A type of GPU may be several machines.
    found = jobs("easyllm", gpu_type="80 GB GPU, type not stated (A100 or A800: I)", grad_dtype="bf16")
    assert [job.bandwidth for job in found] == [(), (("nvlink", 160e9),)]
    # Rows of an unknown table are a user's own.
    found = jobs("mine", vpp="", cp="", zero_stage="")
    assert found[0].framework.overlap_grad_reduce
    assert found[0].vpp == 1


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    return path


@pytest.mark.wide
def test_every_committed_row_is_read() -> None:
    tables = [read_rows(path) for path in BOOK.tables]
    assert sum(map(len, tables)) == 4664
    for rows in tables:
        assert all(row.model and row.outcome for row in rows)
        assert len({row.line for row in rows}) == len(rows)


def test_a_time_is_what_is_printed_or_follows_from_a_throughput(tmp_path: Path) -> None:
    rows = read_rows(
        table(
            tmp_path,
            "seq_len,gpus,global_batch,step_time_s,samples_per_s,tokens_per_s_per_gpu,tokens_per_s_total,outcome\n"
            "1000,8,16,4.5,,,,ok\n1000,8,16,,8,,,ok\n1000,8,16,,,500,,ok\n1000,8,16,,,,8000,ok\n"
            "<= 1000,8,16,,,500,,ok\n1000,8,,,8,,,oom\n",
        )
    )
    assert [row.published_s for row in rows] == [4.5, 2.0, 4.0, 2.0, None, None]
    assert [row.seq_at_most for row in rows] == [False] * 4 + [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer,outcome\n1,ok\n", "mine.csv:1: column=layer"),
        ("layers,outcome\n1,ok\n1.5,ok\n", "mine.csv:3: layers=1.5: must be a positive integer or empty"),
        ("step_time_s,outcome\nfast,ok\n", "mine.csv:2: step_time_s=fast: must be a positive number or empty"),
        ("step_time_s,outcome\n-1,ok\n", "mine.csv:2: step_time_s=-1: must be a positive number"),
        ("step_time_s,outcome\ninf,ok\n", "mine.csv:2: step_time_s=inf: must be a positive number"),
        ("sequence_parallel,outcome\nmaybe,ok\n", "mine.csv:2: sequence_parallel=maybe: must be true, false or empty"),
        ("layers,outcome\n1,fine\n", "mine.csv:2: outcome=fine"),
        ("layers,outcome\n1\n", "mine.csv:2: outcome="),
    ],
)
def test_a_wrong_table_is_told_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_rows(table(tmp_path, text))
    assert str(error.value).startswith(message)


def test_what_is_no_table_is_told_its_file(tmp_path: Path) -> None:
    for text in ("", "layers,outcome\n1,ok\n1,ok,3\n"):
        with pytest.raises(UserError, match=r"mine\.csv: must be a CSV file that can be read"):
            read_rows(table(tmp_path, text))
    with pytest.raises(UserError, match=r"none\.csv: must be a CSV file that can be read"):
        read_rows(tmp_path / "none.csv")
