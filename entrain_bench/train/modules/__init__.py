"""Stages of encoders and the LLM, built from megatron-core's parts, on packed sequences."""

from entrain_bench.train.modules.ends import input_width
from entrain_bench.train.modules.packing import Pack, StageGroups, in_stage_order, merge_tokens
from entrain_bench.train.modules.stage import NamedParameter, Stage, build_stage, initialise, named_parameters

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
