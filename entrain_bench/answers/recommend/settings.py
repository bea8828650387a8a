"""Settings of frameworks for a plan: flags or YAML as each framework's own parser takes them.

Names were read in the frameworks' sources of August 2026: NVIDIA/Megatron-LM d98e8a64, NVIDIA-NeMo/Megatron-Bridge
067f987d, huggingface/transformers 5.23, hiyouga/LLaMA-Factory ff6d4d12, modelscope/ms-swift 3602360a,
ByteDance-Seed/VeOmni d9774494, pytorch/torchtitan b5bcd76c. docs/recommend.md says which parsers the tests run.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from entrain_bench.answers.recommend.engines import DEEPSPEED, MEGATRON, SHARDED
from entrain_bench.answers.recommend.megatron import blocks_of_stages, consecutive_ranks, num_ranks
from entrain_bench.program.layout import Layout
from entrain_bench.specs.framework import BF16, FP8, FP8_BLOCK, UNPADDED
from entrain_bench.specs.job import Job
from entrain_bench.specs.module_layers import FUSED, Experts
from entrain_bench.specs.sharding import ZERO1, ZERO2, ZERO3

type Value = bool | int | str
type Values = dict[str, Any]
# Letters of a line of flags.
WIDTH = 100
STAGES = {ZERO1: 1, ZERO2: 2, ZERO3: 3}


@dataclass(frozen=True, slots=True)
class Settled:
    """A plan to spell: job, layout, samples of a microbatch, and LLM tokens of a sample on average."""

    job: Job
    layout: Layout
    microbatch_size: int
    mean_tokens: float

    @property
    def sharding(self) -> str:
        """How the LLM's weights are sharded."""
        return self.layout.modules[self.job.model.llm_index].sharding

    @property
    def ep(self) -> int:
        """Ranks that divide the LLM's experts."""
        return self.layout.modules[self.job.model.llm_index].ep

    @property
    def recomputes(self) -> bool:
        """Whether the LLM recomputes activations."""
        return self.layout.modules[self.job.model.llm_index].recompute

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a rank in an iteration."""
        llm = self.layout.modules[self.job.model.llm_index]
        return self.job.global_batch // (llm.dp * self.microbatch_size)


def megatron_values(plan: Settled) -> dict[str, Value]:
    """Return Megatron-LM's arguments for a layout that is not refused, in the order of a launch script."""
    job = plan.job
    framework = job.framework
    llm = plan.layout.modules[job.model.llm_index]
    others = [placed for placed in plan.layout.modules if placed is not llm]
    pp = num_ranks(llm) // llm.ranks_per_block
    blocks = blocks_of_stages(llm)
    ends = len(blocks) == pp and len({*blocks}) > 1
    gathers = framework.overlap_param_gather and framework.distributed_optimizer
    fused = framework.cross_entropy == FUSED
    values: dict[str, Value] = {
        "tensor_model_parallel_size": llm.tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": llm.cp,
        **_expert_values(job.model.llm.config.experts, llm.ep),
        "use_tp_pp_dp_mapping": pp > 1 and llm.dp > 1 and np.array_equal(llm.ranks, consecutive_ranks(llm, pp)),
        "num_layers_per_virtual_pipeline_stage": blocks[0] if len(blocks) > pp else 0,
        "decoder_first_pipeline_num_layers": blocks[0] if ends else 0,
        "decoder_last_pipeline_num_layers": blocks[-1] if ends else 0,
        "micro_batch_size": plan.microbatch_size,
        "global_batch_size": job.global_batch,
        "recompute_granularity": "full" if llm.recompute else "",
        "recompute_method": "uniform" if llm.recompute else "",
        "recompute_num_layers": int(llm.recompute),
        "recompute_vision": llm.recompute and any(placed.recompute for placed in others),
        "sequence_parallel": framework.sequence_parallel and llm.tp > 1,
        "use_distributed_optimizer": framework.distributed_optimizer,
        "overlap_grad_reduce": framework.overlap_grad_reduce,
        "overlap_param_gather": gathers,
        "no_align_param_gather": gathers and not framework.align_param_gather,
        "freeze_LM": job.model.llm.name in framework.freeze,
        "freeze_ViT": any(module.name in framework.freeze for module in job.model.encoders),
        "bf16": True,
        "fp8_format": "" if framework.precision == BF16 else "hybrid",
        "fp8_recipe": {FP8: "tensorwise", FP8_BLOCK: "blockwise"}.get(framework.precision, ""),
        "grad_reduce_in_bf16": framework.grad_dtype == BF16,
        "cross_entropy_loss_fusion": fused,
        "cross_entropy_fusion_impl": "te" if fused else "",
    }
    return {name: value for name, value in values.items() if value}


def _expert_values(experts: Experts | None, ep: int) -> dict[str, Value]:
    """Arguments of a mixture of experts, whose TP is that of attention by default."""
    if experts is None:
        return {}
    return {
        "expert_model_parallel_size": ep,
        "num_experts": experts.count,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def megatron_flags(plan: Settled) -> list[str]:
    """Return Megatron-LM's command line."""
    return [
        f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
        for name, value in megatron_values(plan).items()
    ]


# Fields of Megatron-Bridge's ConfigContainer by argument of Megatron-LM; True and False are written for flags.
BRIDGE: Mapping[str, str] = {
    "tensor_model_parallel_size": "model.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "context_parallel_size": "model.context_parallel_size",
    "expert_model_parallel_size": "model.expert_model_parallel_size",
    "moe_grouped_gemm": "model.moe_grouped_gemm",
    "moe_token_dispatcher_type": "model.moe_token_dispatcher_type",
    "use_tp_pp_dp_mapping": "dist.use_tp_pp_dp_mapping",
    "decoder_first_pipeline_num_layers": "model.num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "model.num_layers_in_last_pipeline_stage",
    "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.global_batch_size",
    "recompute_granularity": "model.recompute_granularity",
    "recompute_method": "model.recompute_method",
    "recompute_num_layers": "model.recompute_num_layers",
    "sequence_parallel": "model.sequence_parallel",
    "use_distributed_optimizer": "ddp.use_distributed_optimizer",
    "overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "overlap_param_gather": "ddp.overlap_param_gather",
    "freeze_LM": "model.freeze_language_model",
    "freeze_ViT": "model.freeze_vision_model",
    "cross_entropy_loss_fusion": "model.cross_entropy_loss_fusion",
    "cross_entropy_fusion_impl": "model.cross_entropy_fusion_impl",
}


def bridge_overrides(plan: Settled) -> list[str]:
    """Return overrides of a Megatron-Bridge recipe."""
    values = megatron_values(plan)
    texts = [f"{BRIDGE[name]}={value}" for name, value in values.items() if name in BRIDGE]
    if layers := values.get("num_layers_per_virtual_pipeline_stage"):
        llm = plan.layout.modules[plan.job.model.llm_index]
        turns = sum(blocks_of_stages(llm)) // (int(layers) * int(values["pipeline_model_parallel_size"]))
        texts.append(f"model.virtual_pipeline_model_parallel_size={turns}")
    if "no_align_param_gather" in values:
        texts.append("ddp.align_param_gather=False")
    scaling = {"tensorwise": "with_fp8_current_scaling_", "blockwise": "with_fp8_subchannel_scaling_"}
    mixed = f"mixed_precision=bf16_{scaling.get(str(values.get('fp8_recipe')), '')}mixed"
    return [*texts, f"ddp.grad_reduce_in_fp32={'grad_reduce_in_bf16' not in values}", mixed]


def trainer_values(plan: Settled) -> Values:
    """Return arguments of transformers' Trainer; ZeRO-1 and ZeRO-2 by DeepSpeed, ZeRO-3 by FSDP2."""
    values: Values = {
        "per_device_train_batch_size": plan.microbatch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "bf16": True,
    }
    if plan.sharding in DEEPSPEED:
        return values | {"gradient_checkpointing": plan.recomputes, "deepspeed": deepspeed_values(plan)}
    wrap = {"version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    return values | {"fsdp": True, "fsdp_config": wrap | {"activation_checkpointing": plan.recomputes}}


def deepspeed_values(plan: Settled) -> Values:
    """Return DeepSpeed's configuration; Trainer fills in values that are ``auto``."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"stage": STAGES[plan.sharding], "overlap_comm": True, "contiguous_gradients": True}
    return {**dict.fromkeys(sizes, "auto"), "bf16": {"enabled": True}, "zero_optimization": zero}


def llamafactory_values(plan: Settled) -> Values:
    """Return training arguments of LLaMA-Factory, which recomputes unless told not to."""
    values = trainer_values(plan)
    values.pop("gradient_checkpointing", None)
    if "fsdp_config" in values:
        values["fsdp_config"] = {**values["fsdp_config"], "activation_checkpointing": False}
    return {**values, "disable_gradient_checkpointing": not plan.recomputes}


def swift_flags(plan: Settled) -> list[str]:
    """Return the command line of ``swift sft``, which has DeepSpeed's stages by name."""
    return [
        f"--per_device_train_batch_size {plan.microbatch_size}",
        f"--gradient_accumulation_steps {plan.num_microbatches}",
        f"--gradient_checkpointing {str(plan.recomputes).lower()}",
        f"--deepspeed {plan.sharding}",
        "--torch_dtype bfloat16",
        f"--padding_free {str(plan.job.framework.padding == UNPADDED).lower()}",
    ]


def veomni_values(plan: Settled) -> Values:
    """Return VeOmni's training arguments: FSDP2."""
    return {
        "train": {
            "accelerator": {
                "fsdp_config": {"fsdp_mode": "fsdp2", "reshard_after_forward": True},
                **({"ep_size": plan.ep} if plan.ep > 1 else {}),
            },
            "micro_batch_size": plan.microbatch_size,
            "global_batch_size": plan.job.global_batch,
            "gradient_checkpointing": {"enable": plan.recomputes},
        }
    }


def titan_flags(plan: Settled) -> list[str]:
    """Return torchtitan's command line, which counts tokens; recomputation is in the model's config."""
    tokens = round(plan.mean_tokens * plan.microbatch_size)
    dp = plan.layout.modules[plan.job.model.llm_index].dp
    return [
        f"--parallelism.data_parallel_shard_degree={dp}",
        "--parallelism.fsdp_reshard_after_forward=always",
        *([f"--parallelism.expert_parallel_degree={plan.ep}"] if plan.ep > 1 else []),
        f"--training.num_tokens_per_microbatch_per_dp_rank={tokens}",
        f"--training.num_tokens_per_train_step={tokens * dp * plan.num_microbatches}",
    ]


def command_lines(words: Sequence[str]) -> list[str]:
    """Return words of a command line in lines; a flag and its value stay together."""
    joined = " ".join(word.replace(" ", "\0") for word in words)
    lines = textwrap.wrap(joined, WIDTH, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\0", " ") for line in lines]


def yaml_lines(values: Values) -> list[str]:
    """Return a line of YAML for every key, nested values in braces."""
    return [f"{key}: {_flow(value)}" for key, value in values.items()]


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework: its engine, how it spells a plan, and the shardings that it has (empty: all of the engine).

    ``pads``: the override for its own collator, which pads; empty if it packs or the plan says that it packs.
    ``divides``: whether its ranks can divide experts.
    """

    name: str
    engine: str
    spell: Callable[[Settled], list[str]]
    shardings: tuple[str, ...] = ()
    pads: str = ""
    divides: bool = False

    def takes(self, engine: str, layout: Layout) -> bool:
        """Whether it has the engine, the sharding and the expert parallelism of a plan."""
        divided = self.divides or all(placed.ep == 1 for placed in layout.modules)
        shards = not self.shardings or layout.modules[-1].sharding in self.shardings
        return engine == self.engine and divided and shards


FRAMEWORKS: Mapping[str, Framework] = {
    "megatron": Framework("Megatron-LM", MEGATRON, lambda plan: command_lines(megatron_flags(plan)), divides=True),
    "bridge": Framework("Megatron-Bridge", MEGATRON, lambda plan: command_lines(bridge_overrides(plan)), divides=True),
    "trainer": Framework(
        "transformers' Trainer", SHARDED, lambda plan: yaml_lines(trainer_values(plan)), pads="padding=longest"
    ),
    "swift": Framework("ms-swift", SHARDED, lambda plan: command_lines(swift_flags(plan))),
    "llamafactory": Framework(
        "LLaMA-Factory", SHARDED, lambda plan: yaml_lines(llamafactory_values(plan)), pads="padding=multiple"
    ),
    "veomni": Framework("VeOmni", SHARDED, lambda plan: yaml_lines(veomni_values(plan)), (ZERO3,), divides=True),
    "torchtitan": Framework(
        "torchtitan", SHARDED, lambda plan: command_lines(titan_flags(plan)), (ZERO3,), divides=True
    ),
}
