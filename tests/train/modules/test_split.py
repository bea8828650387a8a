"""Backwards in two passes give the gradients of one, and leave to the second what they should."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from entrain_bench.specs.model import FULL, SELECTIVE
from entrain_bench.train.modules import Pack, Stage, StageGroups
from entrain_bench.train.modules.split import WeightPass
from support.train.allocations import num_bytes
from support.train.kept import LENGTHS, input_of, wide_model
from support.train.modules import batch_of, differences, run_module, small_model, stage_of

MODEL = small_model()
WIDE = wide_model()
SHAPE = (sum(LENGTHS), 256)
LAYERS = [
    (module.name, layer)
    for module in WIDE.modules
    for layer in sorted({module.layer_kind.tolist().index(kind) for kind in module.layer_kind.tolist()})
]
WAITING = 4 * sum(LENGTHS) * sum(gemm.k + gemm.n for gemm in WIDE.llm.layers[1].gemms)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "cuts"), [("vision", (1, 4)), ("audio", (2,)), ("llm", (1, 2, 3)), ("llm", ())])
@pytest.mark.parametrize(
    ("dtype", "recompute"),
    [(torch.float32, ""), (torch.float32, FULL), (torch.float32, SELECTIVE), (torch.bfloat16, "")],
)
def test_two_passes_give_the_gradients_of_one(
    alone: StageGroups, name: str, cuts: tuple[int, ...], dtype: torch.dtype, recompute: str
) -> None:
    model = MODEL.with_recomputation(recompute or FULL)
    options: dict[str, Any] = {"dtype": dtype, "recompute": bool(recompute)}
    whole, split = (
        run_module(model, model.module(name), alone, cuts, splits_backward=split, **options) for split in (False, True)
    )
    assert not differences(split, whole, tolerance=0)


def first_pass(stage: Stage, hidden: Tensor | None, pack: Pack) -> tuple[Tensor | None, WeightPass]:
    """Forward and first pass with ones as gradients of the output."""
    output = stage(hidden, pack)
    leaf = hidden if hidden is not None and hidden.requires_grad else None
    return stage.backward_inputs(get_gradient_edge(output), torch.ones_like(output), leaf)


def split_pack(pack: Pack) -> Pack:
    return Pack(pack.lengths, pack.outputs, pack.token_ids, pack.labels, pack.remade, splits_backward=True)


@pytest.mark.parametrize("name", ["vision", "audio", "llm"])
def test_every_gradient_arrives_once_and_in_the_second_pass(alone: StageGroups, name: str) -> None:
    """As hooks expect that send gradients off; the LLM's vocabulary is used twice, an encoder's features learn not."""
    module = MODEL.module(name)
    stage, (first, pack) = stage_of(MODEL, module, alone), batch_of(module)
    arrived: Counter[str] = Counter()
    nodes = []
    for key, parameter in stage.named_parameters():
        nodes.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
        nodes[-1].register_hook(lambda *_, key=key: arrived.update([key]))
    given, left = first_pass(stage, first.requires_grad_(not module.is_encoder), split_pack(pack))
    assert (given is None) == module.is_encoder
    assert not arrived
    left.run()
    assert arrived == Counter(dict.fromkeys(dict(stage.named_parameters()), 1))
    assert not left.left


@pytest.mark.wide
@pytest.mark.parametrize(("name", "layer"), LAYERS)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_waits_is_what_is_predicted(alone: StageGroups, name: str, layer: int, recompute: bool) -> None:
    """Between the passes a layer keeps the inputs of its products and the gradients of their outputs.

    The embedding of tokens, whose gradient the simulator counts to the first pass, keeps those of its rows.
    """
    module = WIDE.module(name)
    stage = stage_of(WIDE, module, alone, range(layer, layer + 1), recompute=recompute)
    hidden, pack = input_of(module, layer, alone, torch.float32)
    _, left = first_pass(stage, hidden, split_pack(pack))
    parts = [gradient for parts in left.left.values() for _, gradient in parts]
    waiting = [tensor for gradient in parts for tensor in gradient.args if isinstance(tensor, Tensor)]  # type: ignore[attr-defined]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in waiting}
    small = sum(num_bytes(p) for p in stage.parameters() if p.dim() == 1)
    predicted = sum(LENGTHS) * module.layers[layer].weight_pass_bytes(1, 4)
    rows = 0 if layer or module.is_encoder else sum(LENGTHS) * module.config.hidden_size * 4
    assert sum(storages.values()) - small == pytest.approx(predicted + rows, rel=0.01)
