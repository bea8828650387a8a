"""Stages of encoders and the LLM, built from megatron-core's parts, on packed sequences."""

from entrain_bench.train.modules.build import NamedParameter, build_stage, initialise, named_parameters
from entrain_bench.train.modules.ends import input_width
from entrain_bench.train.modules.grids import in_stage_order, merge_tokens
from entrain_bench.train.modules.packing import Pack, StageGroups
from entrain_bench.train.modules.stage import Stage

__all__ = [
    "NamedParameter",
    "Pack",
    "Stage",
    "StageGroups",
    "build_stage",
    "in_stage_order",
    "initialise",
    "input_width",
    "merge_tokens",
    "named_parameters",
]
