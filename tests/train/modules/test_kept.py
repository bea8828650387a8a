"""What layers keep for backward on the CPU is what the simulator predicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from entrain_bench.specs.model import FULL, SELECTIVE, ModuleSpec
from entrain_bench.train.device import prepare_platform
from entrain_bench.train.modules import StageGroups
from support.train.kept import one_layer, wide_model
from support.train.ranks import run_ranks

MODEL = wide_model()
TOLERANCE = 0.1
LAYERS = [
    (module.name, layer)
    for module in MODEL.modules
    for layer in sorted({module.layer_kind.tolist().index(kind) for kind in module.layer_kind.tolist()})
]


def name_of(module: ModuleSpec, layer: int) -> str:
    return f"{module.name} {module.layers[layer].kind}"


@pytest.mark.wide
@pytest.mark.parametrize(("module", "layer"), LAYERS, ids=[name_of(MODEL.module(m), layer) for m, layer in LAYERS])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recompute", ["", FULL, SELECTIVE], ids=["kept", "recomputed", "selectively"])
def test_a_layer_keeps_what_is_predicted(
    alone: StageGroups, module: str, layer: int, dtype: torch.dtype, recompute: str
) -> None:
    model = MODEL.with_recomputation(recompute or FULL)
    ready = one_layer(model, model.module(module), layer, alone, dtype, bool(recompute))
    kept, _ = ready.predicted()
    assert ready.counted()["kept"] == pytest.approx(kept, rel=TOLERANCE)
    assert ready.saved() == pytest.approx(kept, rel=TOLERANCE)


def test_the_language_head_needs_what_is_predicted_while_it_runs(alone: StageGroups) -> None:
    ready = one_layer(MODEL, MODEL.llm, len(MODEL.llm.layers) - 1, alone, torch.bfloat16, False)
    counted, (_, most) = ready.counted(), ready.predicted()
    assert counted["forward"] == pytest.approx(most, rel=TOLERANCE)
    assert counted["backward"] == pytest.approx(most, rel=TOLERANCE)


@pytest.mark.wide
@pytest.mark.parametrize("recompute", ["", FULL, SELECTIVE], ids=["kept", "recomputed", "selectively"])
def test_the_backward_of_a_block_needs_what_is_predicted(alone: StageGroups, recompute: str) -> None:
    """But for gradients of weights, which a GPU's fused kernels add to the buffer at once."""
    model = MODEL.with_recomputation(recompute or FULL)
    ready = one_layer(model, model.llm, 1, alone, torch.bfloat16, bool(recompute))
    assert ready.counted()["backward"] == pytest.approx(ready.predicted()[1], rel=0.2)


def kept_by_blocks(rank: int) -> list[tuple[float, float]]:
    """Counted and predicted bytes of the LLM's block, kept and recomputed, with each sample cut over all ranks."""
    prepare_platform()
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    own = StageGroups(groups[rank], dist.group.WORLD, groups[rank])
    cases = [one_layer(MODEL, MODEL.llm, 1, own, torch.float32, recompute) for recompute in (False, True)]
    return [(ready.saved(), ready.predicted()[0]) for ready in cases]


@pytest.mark.wide
def test_context_parallel_ranks_keep_their_own_keys_and_values() -> None:
    for found in run_ranks(kept_by_blocks, 4):
        for counted, predicted in found:
            assert counted == pytest.approx(predicted, rel=TOLERANCE)


def kept_on_ranks(rank: int, tp: int) -> dict[str, tuple[float, float]]:
    """Counted and predicted bytes on this rank, by case."""
    prepare_platform()
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    own = StageGroups(dist.group.WORLD, groups[rank], groups[rank])
    found = {}
    for module_name, layer in LAYERS:
        module = MODEL.module(module_name)
        for split in (False, True):
            for recompute in ("", FULL, SELECTIVE):
                case, model = replace(own, sequence_parallel=split), MODEL.with_recomputation(recompute or FULL)
                ready = one_layer(model, model.module(module_name), layer, case, torch.float32, bool(recompute))
                found[f"{name_of(module, layer)} tp={tp} {split=} {recompute=}"] = ready.saved(), ready.predicted()[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_ranks_keep_what_is_predicted(tp: int) -> None:
    for found in run_ranks(kept_on_ranks, tp, tp):
        wrong = {case: both for case, both in found.items() if abs(both[0] / both[1] - 1) > TOLERANCE}
        assert not wrong
