"""Experts in place of a block's MLP: megatron-core's router, dispatcher and experts; no token is dropped."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.split import ColumnProduct, RowProduct

# Name of an expert's number in the names of a stage's parameters.
LOCAL = "local_experts"


def check_trainable(module: ModuleSpec, groups: StageGroups) -> None:
    """Raise ``IncompatibleError`` for experts that megatron-core's layer does not have."""
    experts = module.config.experts
    if experts is None:
        return
    where = f"model.modules.{module.name}"
    for key, value, trained in (
        ("experts.bias", experts.bias, False),
        ("experts.visual_count", experts.visual_count, 0),
        ("linear_bias", module.config.linear_bias, False),
        ("gated_mlp", module.config.gated_mlp, True),
    ):
        if value != trained:
            raise IncompatibleError(f"{where}.{key}={value}: must be {trained} to train experts. Use harness=simulate")
    if groups.tp.size() > 1 and not groups.sequence_parallel:
        raise IncompatibleError(
            f"sequence_parallel=false: must be true to train the experts of module {module.name} with tensor "
            "parallelism. Use layout.tp=1"
        )


def expert_options(module: ModuleSpec, groups: StageGroups) -> dict[str, Any]:
    """Arguments of megatron-core's configuration for a module with experts; empty without."""
    experts = module.config.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.top_k,
        # A softmax over the one chosen expert would be 1, without a gradient.
        "moe_router_pre_softmax": experts.top_k == 1,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": groups.ep,
        "expert_tensor_parallel_size": groups.tp.size(),
    }


def block_groups(groups: StageGroups) -> ProcessGroupCollection:
    """The process groups of a block, whose experts have the TP of attention."""
    divided = groups.experts
    return ProcessGroupCollection(
        tp=groups.tp,
        cp=groups.cp,
        ep=divided.ep if divided else ALONE,
        expt_tp=groups.tp,
        expt_dp=divided.same if divided else groups.dp_cp,
        tp_ep=divided.tp_ep if divided else groups.tp,
    )


def expert_layer(**options: Any) -> MoELayer:
    """The experts of a block; ``options`` as megatron-core gives them."""
    products = MLPSubmodules(ColumnProduct, RowProduct)
    parts = MoESubmodules(
        experts=partial(SequentialMLP, submodules=products),
        shared_experts=partial(SharedExpertMLP, submodules=products),
    )
    return MoELayer(submodules=parts, **options)


class Alone:
    """The group of one rank, which exchanges nothing."""

    def size(self) -> int:
        """Its ranks."""
        return 1

    def rank(self) -> int:
        """The rank's place."""
        return 0


ALONE: Any = Alone()


def global_name(name: str, groups: StageGroups, num_experts: int) -> str:
    """A parameter's name with the number of its expert among those of all ranks."""
    before, local, rest = name.partition(f".{LOCAL}.")
    if not local or groups.experts is None:
        return name
    number, _, rest = rest.partition(".")
    first = groups.experts.ep.rank() * (num_experts // groups.ep)
    return f"{before}{local}{first + int(number)}.{rest}"
