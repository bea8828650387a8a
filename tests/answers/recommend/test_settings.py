"""Settings that frameworks take: parsed by Megatron-LM's and transformers' own parsers, and what no flag can say."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import yaml

from entrain_bench.answers.recommend.engines import ENGINES, READERS, variants_of
from entrain_bench.answers.recommend.settings import (
    BRIDGE,
    FRAMEWORKS,
    Settled,
    bridge_overrides,
    command_lines,
    deepspeed_values,
    llamafactory_values,
    megatron_flags,
    swift_flags,
    titan_flags,
    trainer_values,
    veomni_values,
    yaml_lines,
)
from entrain_bench.base.errors import UserError
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.job import Job
from support.builders import tiny_cluster, tiny_job, tiny_model

MODEL, TEXT = tiny_model(encoder=3, llm=8), tiny_model(encoder=0, llm=8)
TP, PP, DP, BATCH, SIZE = 2, 4, 2, 16, 2
STOCK = FrameworkOptions(encoder_sp=False, encoder_cp=False)
# Flags of Megatron-LM's multimodal example, which its core parser does not have.
OF_THE_EXAMPLE = ("--freeze-LM", "--freeze-ViT", "--recompute-vision")


def job_of(framework: FrameworkOptions = STOCK, text: bool = False) -> Job:
    model = TEXT if text else MODEL
    return tiny_job(model, tiny_cluster(2, 8), global_batch=BATCH, microbatch_size=SIZE, framework=framework)


def piped(framework: FrameworkOptions = STOCK, layers: tuple[int, ...] = (2, 3, 3, 2), **changes: Any) -> Settled:
    """A pipeline of four stages; the encoder is whole on the first."""
    ranks = np.arange(DP * PP * TP).reshape(DP, PP, TP)
    llm = ModuleLayout("llm", TP, 1, layers, ranks, **changes)
    vision = ModuleLayout("vision", TP, 1, (5,), ranks[:, :1], **changes)
    return Settled(job_of(framework), Layout((vision, llm), BATCH // SIZE // DP), SIZE, 100.0)


def interleaved() -> Settled:
    """A text model on two virtual stages per rank."""
    ranks = np.arange(DP * PP * TP).reshape(DP, PP, TP)
    llm = ModuleLayout("llm", TP, 1, (2, 1, 1, 1, 1, 1, 1, 2), np.concatenate([ranks] * 2, axis=1))
    return Settled(job_of(text=True), Layout((llm,), BATCH // SIZE // DP), SIZE, 100.0)


def replicated(sharding: str, recompute: bool = False, ep: int = 1) -> Settled:
    """Every one of 8 ranks holds the whole model, but for experts that ``ep`` ranks divide."""
    ranks = np.arange(8).reshape(8, 1, 1)
    modules = [
        ModuleLayout(name, 1, 1, (layers,), ranks, sharding=sharding, recompute=recompute, ep=degree)
        for name, layers, degree in (("vision", 5, 1), ("llm", 10, ep))
    ]
    return Settled(job_of(), Layout(tuple(modules), 1), SIZE, 100.0)


def test_flags_of_a_layout() -> None:
    assert megatron_flags(piped()) == [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 4",
        "--context-parallel-size 1",
        "--use-tp-pp-dp-mapping",
        "--decoder-first-pipeline-num-layers 1",
        "--decoder-last-pipeline-num-layers 1",
        "--micro-batch-size 2",
        "--global-batch-size 16",
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--bf16",
    ]


def test_flags_follow_recomputation_the_framework_and_frozen_modules() -> None:
    other = replace(
        STOCK, sequence_parallel=False, overlap_grad_reduce=False, align_param_gather=False, freeze=("vision",)
    )
    found = " ".join(megatron_flags(piped(other, (3, 2, 2, 3), recompute=True)))
    assert (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --recompute-vision" in found
    )
    assert "--overlap-param-gather --no-align-param-gather --freeze-ViT" in found
    # Two blocks on every stage need no flag.
    assert not {"--decoder-first", "--sequence-parallel", "--overlap-grad-reduce"} & {*found.split()}
    unsharded = megatron_flags(piped(replace(STOCK, distributed_optimizer=False)))
    assert not {"--use-distributed-optimizer", "--overlap-param-gather"} & {*unsharded}


def parsed(flags: list[str]) -> argparse.Namespace:
    """What Megatron-LM's parser makes of flags."""
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False))
    for flag in OF_THE_EXAMPLE:
        parser.add_argument(flag, action="store_true")
    own: argparse.Namespace = parser.parse_args(shlex.split(" ".join(command_lines(flags))))
    return own


def with_experts() -> Settled:
    """A mixture of eight experts; replicas of a stage are on consecutive ranks."""
    experts = {"count": 8, "top_k": 2, "ffn_hidden_size": 32, "shared_ffn_hidden_size": 16}
    ranks = np.arange(DP * PP * TP).reshape(PP, DP, TP).swapaxes(0, 1)
    vision, llm = piped().layout.modules
    modules = replace(vision, ranks=ranks[:, :1]), replace(llm, ranks=ranks, ep=2)
    job = replace(job_of(), model=tiny_model(encoder=3, llm=8, experts=experts))
    return Settled(job, Layout(modules, BATCH // SIZE // DP), SIZE, 100.0)


def test_flags_of_experts() -> None:
    found = megatron_flags(with_experts())
    assert found[3:10] == [
        "--expert-model-parallel-size 2",
        "--num-experts 8",
        "--moe-router-topk 2",
        "--moe-ffn-hidden-size 32",
        "--moe-shared-expert-intermediate-size 16",
        "--moe-grouped-gemm",
        "--moe-token-dispatcher-type alltoall",
    ]
    assert "--use-tp-pp-dp-mapping" not in found
    assert "model.expert_model_parallel_size=2" in bridge_overrides(with_experts())


@pytest.mark.wide
def test_megatron_lm_parses_its_flags() -> None:
    from megatron.core.transformer import TransformerConfig

    other = replace(STOCK, align_param_gather=False, grad_dtype="bf16", cross_entropy="fused", freeze=("vision",))
    plan = piped(other, recompute=True)
    args = parsed(megatron_flags(plan))
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 4)
    assert (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers) == (1, 1)
    assert (args.micro_batch_size, args.global_batch_size) == (2, 16)
    assert (args.recompute_granularity, args.recompute_method, args.recompute_num_layers) == ("full", "uniform", 1)
    assert args.use_tp_pp_dp_mapping
    assert args.sequence_parallel
    assert not args.align_param_gather
    assert args.grad_reduce_in_bf16
    assert args.cross_entropy_loss_fusion
    mixture = parsed(megatron_flags(with_experts()))
    assert (mixture.expert_model_parallel_size, mixture.num_experts, mixture.moe_router_topk) == (2, 8, 2)
    assert parsed(megatron_flags(interleaved())).num_layers_per_virtual_pipeline_stage == 1
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parsed(["--tensor-parallel-size 2"])
    # Its own configuration accepts the split of eight blocks: 1, 3, 3, 1.
    config = TransformerConfig(
        num_layers=8,
        hidden_size=128,
        num_attention_heads=8,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
        sequence_parallel=args.sequence_parallel,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        pipeline_dtype=__import__("torch").bfloat16,
    )
    assert config.num_layers_in_first_pipeline_stage == 1


@pytest.mark.wide
def test_megatron_bridge_overrides_name_fields_of_megatron_core() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    # Bridge's own fields: which parts of a vision-language model are frozen.
    own = {"freeze_language_model", "freeze_vision_model"}
    known = {
        "model": own | {field.name for field in fields(TransformerConfig)},
        "ddp": {field.name for field in fields(DistributedDataParallelConfig)},
    }
    found = [*bridge_overrides(piped(recompute=True)), *bridge_overrides(interleaved())]
    assert "model.num_layers_in_first_pipeline_stage=1" in found
    assert "model.virtual_pipeline_model_parallel_size=2" in found
    assert "ddp.grad_reduce_in_fp32=True" in found
    for text in [*found, *(f"{place}=" for place in BRIDGE.values())]:
        part, _, name = text.partition("=")[0].partition(".")
        assert name in known.get(part, {name}), text


def arguments_of(lines: list[str], folder: str) -> Any:
    """What transformers' parser makes of lines of YAML."""
    from transformers import HfArgumentParser, TrainingArguments

    values: Mapping[str, Any] = yaml.safe_load("\n".join(lines))
    (found,) = HfArgumentParser(TrainingArguments).parse_dict({**values, "output_dir": folder, "use_cpu": True})  # type: ignore[arg-type]
    return found


@pytest.mark.wide
def test_transformers_parses_its_arguments(tmp_path: Any) -> None:
    lines = yaml_lines(trainer_values(replicated("zero3", recompute=True)))
    found = arguments_of(lines, str(tmp_path))
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps, found.bf16) == (2, 1, True)
    assert found.fsdp
    assert found.fsdp_plugin_args["fsdp_version"] == 2
    assert found.fsdp_plugin_args["reshard_after_forward"]
    assert found.fsdp_plugin_args["activation_checkpointing"]
    # DeepSpeed is not installed here, so its configuration goes to accelerate's reader.
    plan = replicated("zero1")
    values = trainer_values(plan)
    assert values.pop("deepspeed") == deepspeed_values(plan)
    assert not arguments_of(yaml_lines(values), str(tmp_path)).gradient_checkpointing
    with pytest.raises(ValueError, match="per_device_batch"):
        arguments_of(["per_device_batch: 2"], str(tmp_path))


@pytest.mark.wide
def test_accelerate_reads_the_stage_of_deepspeed() -> None:
    deepspeed = pytest.importorskip("accelerate.utils.deepspeed")
    for sharding, stage in {"zero1": 1, "zero2": 2}.items():
        config = deepspeed.HfDeepSpeedConfig(deepspeed_values(replicated(sharding)))
        assert config.get_value("zero_optimization.stage") == stage
        assert not config.is_zero3()


def test_a_framework_gets_only_the_shardings_that_it_has() -> None:
    found = variants_of({"a": {"switch_on": {"sharded": []}}}, ["framework"], ["sharded"])
    assert [*found] == ["a by DeepSpeed", "a in HF Trainer"]
    tried = [[text for one in each.attempts for text in one if "sharding" in text] for each in found.values()]
    assert tried == [["layout.sharding=zero1", "layout.sharding=zero2"], ["layout.sharding=zero3"]]
    able = [each.sharded_as(FRAMEWORKS["veomni"].shardings).attempts for each in found.values()]
    assert able == [[], found["a in HF Trainer"].attempts]
    ways = variants_of({"a": {"switch_on": {"sharded": []}}}, ["framework"], ["sharded"], divides=True)
    fixed = {name: [any("layout.ep=1" in one for one in way.attempts)] for name, way in ways.items()}
    assert fixed == {"a by DeepSpeed": [True], "a in HF Trainer": [True], "a with EP": [False]}
    with pytest.raises(UserError, match="strategy=a: switch_on=megatrn: unknown"):
        variants_of({"a": {"switch_on": {"megatrn": []}}}, ["framework"], ["megatron"])


def test_other_frameworks_by_hand() -> None:
    kept = replicated("zero1")
    assert swift_flags(kept)[:4] == [
        "--per_device_train_batch_size 2",
        "--gradient_accumulation_steps 1",
        "--gradient_checkpointing false",
        "--deepspeed zero1",
    ]
    assert llamafactory_values(kept)["disable_gradient_checkpointing"]
    again = llamafactory_values(replicated("zero3", recompute=True))
    assert (again["disable_gradient_checkpointing"], again["fsdp_config"]["activation_checkpointing"]) == (False, False)
    divided = replicated("zero3", ep=8)
    assert veomni_values(divided)["train"]["accelerator"]["ep_size"] == 8
    assert "--parallelism.expert_parallel_degree=8" in titan_flags(divided)
    taking = [key for key, one in FRAMEWORKS.items() if one.takes("sharded", divided.layout)]
    assert taking == ["veomni", "torchtitan"]
    train = veomni_values(replicated("zero3"))["train"]
    assert (train["micro_batch_size"], train["global_batch_size"]) == (2, 16)
    # Two samples of 100 tokens on 8 ranks.
    assert titan_flags(replicated("zero3"))[2:] == [
        "--training.num_tokens_per_microbatch_per_dp_rank=200",
        "--training.num_tokens_per_train_step=1600",
    ]
    takers = {
        sharding: [key for key, one in FRAMEWORKS.items() if one.takes("sharded", replicated(sharding).layout)]
        for sharding in ("zero1", "zero3")
    }
    assert takers["zero1"] == ["trainer", "swift", "llamafactory"]
    assert takers["zero3"] == ["trainer", "swift", "llamafactory", "veomni", "torchtitan"]


def test_padding_is_that_of_the_users_framework() -> None:
    names = {"packer": {"switch_on": {"loop": [], "sharded": []}}}
    padding = ("padding=longest",)
    ways = variants_of(names, READERS, [*ENGINES], padding)
    for way in ways.values():
        # This suite's runtime packs.
        assert all((padding[0] in attempt) == bool(way.engine) for attempt in way.attempts)
    assert len(ways) == 4
    kept = replicated("zero1")
    pads = replace(kept, job=replace(kept.job, framework=replace(kept.job.framework, padding="longest")))
    assert ("--padding_free true" in swift_flags(kept), "--padding_free false" in swift_flags(pads)) == (True, True)
    assert {key: one.pads for key, one in FRAMEWORKS.items() if one.pads} == {
        "trainer": "padding=longest",
        "llamafactory": "padding=multiple",
    }
