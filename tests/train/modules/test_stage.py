"""Stages cut in any way against themselves, on one rank: whole, by other kernels, in two passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.specs.model import FULL, SELECTIVE, ModelSpec
from entrain_bench.train.modules import stage as stage_module
from entrain_bench.train.modules.blocks import AttentionKernel, kernel_for
from entrain_bench.train.modules.packing import Pack, StageGroups
from entrain_bench.train.modules.split import WeightPass
from entrain_bench.train.modules.stage import Stage, build_stage, initialise, named_parameters
from support.builders import TOKENS
from support.train.allocations import num_bytes, saved_bytes
from support.train.kept import LENGTHS, input_of, one_of_each_kind, wide_model
from support.train.modules import (
    SAMPLES,
    batch_of,
    differences,
    module_config,
    relative_errors,
    run_module,
    small_model,
    stage_of,
)


@pytest.mark.parametrize(("name", "cuts"), [("vision", (1, 4)), ("audio", (2,)), ("llm", (1, 2, 3))])
def test_stages_equal_the_whole(alone: StageGroups, name: str, cuts: tuple[int, ...]) -> None:
    model = small_model()
    module = model.module(name)
    expected = run_module(model, module, alone)
    assert not differences(run_module(model, module, alone, cuts), expected, tolerance=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["vision", "audio", "llm"])
def test_recomputation_changes_nothing(alone: StageGroups, name: str) -> None:
    model = small_model()
    kept, again = (run_module(model, model.module(name), alone, recompute=value) for value in (False, True))
    assert not differences(again, kept, tolerance=0)
    selective = model.with_recomputation(SELECTIVE)
    again = run_module(selective, selective.module(name), alone, recompute=True)
    assert not differences(again, kept, tolerance=0)


def test_a_chunk_recomputes_as_many_blocks_as_it_is_told(alone: StageGroups) -> None:
    model = small_model()
    stage = stage_of(model, model.llm, alone, range(1, 3))
    kept, gradients = [], []
    for remade in range(3):
        hidden = torch.linspace(-1, 1, sum(SAMPLES) * 128).reshape(-1, 128).requires_grad_()
        run = partial(stage, hidden, Pack(SAMPLES, remade=remade))
        kept.append(saved_bytes(run, *stage.parameters()))
        run().square().sum().backward()
        gradients.append(hidden.grad)
    # Both blocks keep alike; their inputs stay.
    assert kept[0] - kept[1] == pytest.approx(kept[1] - kept[2], rel=0.05)
    assert kept[2] < kept[0] / 5
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["vision", "audio"])
def test_an_encoder_recomputed_at_once_keeps_its_output_alone(alone: StageGroups, name: str) -> None:
    model = small_model()
    stage = stage_of(model, model.module(name), alone)
    features, pack = batch_of(stage.module)
    gradients = []
    for stage.recompute_whole in (False, True):
        output = stage(features, pack)
        output.square().sum().backward()
        gradients.append([parameter.grad for parameter in stage.parameters()])
        stage.zero_grad(set_to_none=True)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))  # type: ignore[arg-type]
    assert saved_bytes(partial(stage, features, pack), features, *stage.parameters()) == num_bytes(output)


@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_blocks_keep_nothing_if_nothing_before_them_learns(alone: StageGroups, *, recompute: bool) -> None:
    model = small_model().with_frozen(["vision"])
    vision = model.module("vision")
    blocks = stage_of(model, vision, alone, range(1, 3), recompute=recompute)
    hidden = torch.zeros(sum(SAMPLES), vision.config.hidden_size, requires_grad=blocks.passes_gradients)
    output = blocks(hidden, Pack(SAMPLES))
    assert not output.requires_grad
    assert saved_bytes(partial(blocks, hidden, Pack(SAMPLES)), *blocks.parameters()) == num_bytes(output)


def test_bf16_is_near_fp32(alone: StageGroups) -> None:
    model = small_model()
    for module in model.modules:
        exact = run_module(model, module, alone)
        rounded = run_module(model, module, alone, dtype=torch.bfloat16)
        assert rounded["output"].dtype == (torch.bfloat16 if module.is_encoder else torch.float32)
        errors = relative_errors(rounded, exact)
        assert max(errors.values()) < 0.1, errors


def test_initial_weights_do_not_depend_on_the_stages(alone: StageGroups) -> None:
    model = small_model()
    whole = stage_of(model, model.llm, alone)
    initialise(whole, 3)
    values = {named.key: named.parameter.clone() for named in named_parameters(whole)}
    for layers in (range(2), range(2, 4)):
        part = build_stage(model, model.llm, layers, alone, seed=3)
        for named in named_parameters(part):
            assert torch.equal(named.parameter, values[named.key]), named.key
    initialise(whole, 4)
    # Other seeds and other layers have other weights.
    first, second = (f"llm.{layer}.mlp.linear_fc1.weight" for layer in (1, 2))
    assert not torch.equal(values[first], dict(whole.named_parameters())["layers.1.mlp.linear_fc1.weight"])
    assert not torch.equal(values[first], values[second])


@pytest.mark.parametrize(
    "name", ["tiny_vision", "tiny_audio", "tiny_llm", "qwen25vl_vision", "whisper_large_encoder", "llama32_1b"]
)
def test_parameters_are_as_many_as_specified(alone: StageGroups, name: str) -> None:
    llm = {"llm": module_config("tiny_llm")} if module_config(name)["role"] == "encoder" else {}
    model = ModelSpec.from_config({"name": "m", "modules": {name: module_config(name)} | llm, "tokens": TOKENS})
    module = model.module(name)
    with torch.device("meta"):
        stage = Stage(
            module,
            range(len(module.layers)),
            alone,
            dtype=torch.bfloat16,
            recompute=False,
            attention=AttentionKernel.FLASH2,
        )
    assert sum(named.parameter.numel() for named in named_parameters(stage)) == module.parameters


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "changes", "tp", "message"),
    [
        ("llm", {"vocab_size": 97}, 2, r"layout.tp=2: must divide the 97 words of module llm"),
        (
            "audio",
            {"embed_gemms": [{"k": 9, "n": 33}, {"k": 33, "n": 64}]},
            2,
            "layout.tp=2: must divide the 33 channels",
        ),
        ("vision", {"embed_gemms": [{"k": 12, "n": 63}]}, 1, "embed_gemms: the last product must return one row"),
        ("vision", {"head_dim": 18}, 1, "head_dim=18"),
        ("vision", {"window_tokens": 8}, 1, "window_tokens=8: must be the square of a multiple of 2"),
        ("vision", {"activation": "gelu"}, 1, "activation=gelu: must be silu to train gated blocks"),
        ("vision", {"qkv_bias": False}, 1, "linear_bias=true: training needs qkv_bias=true"),
        ("vision", {"head_gemms": [{"k": 64, "n": 127}]}, 1, "hidden_size=128"),
        ("vision", {"head_gemms": [{"k": 64, "n": 128, "rows_per_token": 0.3}]}, 1, r"rows_per_token=0.3"),
        ("vision", {"head_gemms": [{"k": 128, "n": 128}]}, 1, "must not overlap"),
        ("vision", {"head_gemms": [{"k": 96, "n": 128, "rows_per_token": 0.25}]}, 1, "k=96"),
        ("audio", {"embed_gemms": [{"k": 384, "n": 64, "rows_per_token": 2.0}, {"k": 100, "n": 64}]}, 1, "k=100"),
    ],
)
def test_unbuildable_modules_are_refused(name: str, changes: dict[str, Any], tp: int, message: str) -> None:
    model = small_model()
    configs = {m.name: module_config(f"tiny_{m.name}") for m in model.modules}
    configs[name] |= changes
    group: Any = Mock(size=lambda: tp, rank=lambda: 0)
    changed = ModelSpec.from_config({"name": "m", "modules": configs, "tokens": TOKENS})
    with pytest.raises((UserError, IncompatibleError), match=message):
        stage_of(changed, changed.module(name), StageGroups(group, group, group))


def test_a_chunk_without_labels_has_no_loss_and_all_gradients(alone: StageGroups) -> None:
    model = small_model()
    stage = stage_of(model, model.llm, alone)
    ids = torch.arange(20)
    loss = stage(None, Pack((20,), (), ids, torch.full((20,), -1)))
    loss.backward()
    assert loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in stage.parameters())


BF16 = torch.bfloat16
FP32 = torch.float32


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "head_dim", "expected"),
    [
        ("cpu", (0, 0), FP32, 64, "cpu"),
        ("cpu", (0, 0), BF16, 20, "cpu"),
        ("cuda", (8, 0), BF16, 80, "flash2"),
        ("cuda", (10, 0), BF16, 256, "flash2"),
        ("cuda", (7, 5), BF16, 80, "sdpa"),
        ("cuda", (9, 0), FP32, 128, "sdpa"),
        ("cuda", (9, 0), BF16, 20, "sdpa"),
        ("cuda", (9, 0), BF16, 264, "sdpa"),
    ],
)
def test_the_best_kernel_that_fits_is_taken(
    device: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    module = small_model(head_dim=head_dim).llm
    assert kernel_for(module, dtype, torch.device(device)) == expected


@pytest.mark.wide
@pytest.mark.parametrize("name", ["vision", "llm"])
def test_stages_compute_the_same_by_length(alone: StageGroups, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    usual = run_module(model, model.module(name), alone)
    monkeypatch.setattr(stage_module, "kernel_for", lambda *_: AttentionKernel.SDPA)
    by_length = run_module(model, model.module(name), alone)
    assert max(relative_errors(by_length, usual).values()) < 1e-5


MODEL = small_model()
WIDE = wide_model()


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
    output = stage(hidden, replace(pack, splits_backward=True))
    leaf = hidden if hidden is not None and hidden.requires_grad else None
    return stage.backward_inputs(get_gradient_edge(output), torch.ones_like(output), leaf)


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
    given, left = first_pass(stage, first.requires_grad_(not module.is_encoder), pack)
    assert (given is None) == module.is_encoder
    assert not arrived
    left.run()
    assert arrived == Counter(dict.fromkeys(dict(stage.named_parameters()), 1))
    assert not left.left


@pytest.mark.wide
@pytest.mark.parametrize(("name", "layer"), one_of_each_kind(WIDE))
@pytest.mark.parametrize("recompute", [False, True])
def test_what_waits_is_what_is_predicted(alone: StageGroups, name: str, layer: int, recompute: bool) -> None:
    """Between the passes a layer keeps the inputs of its products and the gradients of their outputs.

    The embedding of tokens, whose gradient the simulator counts to the first pass, keeps those of its rows.
    """
    module = WIDE.module(name)
    stage = stage_of(WIDE, module, alone, range(layer, layer + 1), recompute=recompute)
    hidden, pack = input_of(module, layer, alone, torch.float32)
    _, left = first_pass(stage, hidden, pack)
    parts = [gradient for parts in left.left.values() for _, gradient in parts]
    waiting = [tensor for gradient in parts for tensor in gradient.args if isinstance(tensor, Tensor)]  # type: ignore[attr-defined]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in waiting}
    small = sum(num_bytes(p) for p in stage.parameters() if p.dim() == 1)
    predicted = sum(LENGTHS) * module.layers[layer].weight_pass_bytes(1, 4)
    rows = 0 if layer or module.is_encoder else sum(LENGTHS) * module.config.hidden_size * 4
    assert sum(storages.values()) - small == pytest.approx(predicted + rows, rel=0.01)
