"""Hugging Face models train by any strategy's program as in a plain loop: losses of three steps, and gradients."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import entrain_bench as eb
from support.train.hub import CONFIGS, plain_loop, run_rank, save_config
from support.train.ranks import run_ranks
from support.train.runs import config_to_json

# A busy machine decides nothing.
pytestmark = pytest.mark.timeout(900)
RANKS = 4
TOLERANCE = 1e-4
# Two stages of the LLM where the strategy has pipelines; the others choose their layouts.
STRATEGIES = {
    "megatron": ("layout.tp=1", "layout.pp=2", "layout.dp=2"),
    "entrain": ("layout.tp=1", "layout.pp=4", "layout.dp=1", "strategy.planner.encoder_stages=2"),
    "disttrain": ("layout.tp=1", "layout.dp=null"),
    "dflop": ("layout.tp=1", "layout.dp=null"),
    "dip": ("layout.tp=1", "layout.pp=2", "layout.dp=2"),
    "orchmllm": ("layout.tp=1", "layout.dp=null"),
    "braid": ("layout.tp=1", "layout.dp=null"),
    "fsdp": ("layout.tp=1", "layout.dp=null"),
    "hetero_colocated": ("layout.tp=1", "layout.dp=null"),
}
SAMPLE = [
    ("qwen2_5_vl", "megatron"),
    ("qwen3_vl", "megatron"),
    ("gemma3", "megatron"),
]
EVERY = [(kind, strategy) for kind in CONFIGS for strategy in STRATEGIES if (kind, strategy) not in SAMPLE]
known_loop = cache(plain_loop)


def check(kind: str, folder: Path, *overrides: str, stay: bool = True) -> list[dict[str, Any]]:
    """Compare losses and gradients of all ranks with the plain loop's; returns the modules of the layout."""
    save_config(kind, folder)
    common = ("cluster=tiny", "workload=synthetic", "global_batch=8", "microbatch_size=2", "layout.ep=1", "tuning=own")
    config = config_to_json(eb.compose(f"model=hf:{folder}", *common, *overrides))
    losses, gradients = known_loop(kind)
    held = set()
    outcomes = run_ranks(run_rank, RANKS, kind, config, stay=stay)
    for own_losses, own_gradients, _ in outcomes:
        np.testing.assert_allclose(own_losses, losses, atol=TOLERANCE)
        for name, gradient in own_gradients.items():
            np.testing.assert_allclose(gradient, gradients[name], atol=TOLERANCE, err_msg=name)
        held |= own_gradients.keys()
    assert held == gradients.keys()
    modules: list[dict[str, Any]] = outcomes[0][2]
    return modules


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "strategy"), SAMPLE)
def test_a_sample_of_families_and_strategies(kind: str, strategy: str, tmp_path: Path) -> None:
    check(kind, tmp_path, f"strategy={strategy}", *STRATEGIES[strategy])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), EVERY)
def test_every_family_by_every_strategy(kind: str, strategy: str, tmp_path: Path) -> None:
    layout = check(kind, tmp_path, f"strategy={strategy}", *STRATEGIES[strategy], stay=strategy != "fsdp")
    if any(override.startswith("layout.pp=") for override in STRATEGIES[strategy]):
        assert layout[-1]["pp"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_groups_of_several_widths(kind: str, tmp_path: Path) -> None:
    layout = check(kind, tmp_path, "strategy=braid", "strategy/planner=hybrid_cp", "layout.tp=1", stay=False)
    assert all(len(module["widths"]) > 1 for module in layout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("degree", ["tp", "cp"])
def test_tensor_and_context_parallelism(kind: str, degree: str, tmp_path: Path) -> None:
    one = {"tp": "layout.cp=1", "cp": "layout.tp=1"}[degree]
    check(kind, tmp_path, "strategy=megatron", f"layout.{degree}=2", one, "layout.dp=2", stay=False)
