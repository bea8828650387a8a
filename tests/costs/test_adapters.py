"""Low-rank adapters by hand: parameters, products of both passes, states, what trains, and files of PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.config.adapter_file import with_adapter
from entrain_bench.costs.loads import compute_loads
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.roofline import Roofline
from entrain_bench.specs.adapters import Adapter
from entrain_bench.specs.framework import FrameworkOptions, with_options
from entrain_bench.specs.model import TRAINING_FLOPS, ModelSpec
from support.builders import TOKENS, chain_layout, llm_config, samples, tiny_cluster, tiny_model

MODEL = tiny_model(encoder=2, llm=2)
RANK = 4
BLOCKS = 2


def adapted(*targets: str, freeze: tuple[str, ...] = ("all",), model: ModelSpec = MODEL) -> ModelSpec:
    return with_options(model, FrameworkOptions(freeze=freeze, adapter=Adapter(RANK, targets)))


def test_parameters_are_those_of_two_products_of_the_rank() -> None:
    # 8 heads of 16, 4 key-value heads, width 128, gated MLP of 256.
    attention = RANK * ((128 + 128) + 2 * (128 + 64) + (128 + 128))
    mlp = RANK * 3 * (128 + 256)
    assert adapted("q_proj").llm.learning_parameters == BLOCKS * RANK * (128 + 128)
    assert adapted("llm.all-linear").llm.learning_parameters == BLOCKS * (attention + mlp)
    fused = RANK * ((128 + 256) + (128 + 128) + (128 + 512) + (256 + 128))
    megatron = adapted("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    assert megatron.llm.learning_parameters == BLOCKS * fused
    # PEFT freezes all else, projectors included; without `all` the encoder goes on learning.
    assert adapted("q_proj").module("vision").learning_parameters == 0
    free = adapted("q_proj", freeze=())
    assert free.module("vision") == MODEL.module("vision")
    assert not any(layer.learns for layer in free.llm.layers)


def test_experts_have_adapters_of_their_own() -> None:
    experts = {"count": 8, "top_k": 2, "ffn_hidden_size": 32, "shared_ffn_hidden_size": 16}
    config = {"name": "m", "modules": {"llm": llm_config(1, experts=experts)}, "tokens": TOKENS}
    llm = adapted("down_proj", model=ModelSpec.from_config(config)).llm
    block = llm.layers[1]
    assert block.trained_expert_parameters == 8 * RANK * (32 + 128)
    assert llm.learning_parameters == 8 * RANK * (32 + 128) + RANK * (16 + 128)
    # A token meets two of eight.
    plain = ModelSpec.from_config(config).llm
    more = 2 * RANK * (32 + 128) + RANK * (16 + 128)
    assert llm.active_parameters == plain.active_parameters + more


def test_flops_are_those_of_the_base_without_weight_gradients_and_of_adapters_with_them() -> None:
    shapes = samples((100, [400]), (50, [200, 100]))
    tokens = int(shapes.llm_tokens.sum())
    model = adapted("q_proj", "down_proj")
    of_adapters = 2 * tokens * BLOCKS * RANK * ((128 + 128) + (256 + 128))
    assert model.forward_flops(shapes) == pytest.approx(MODEL.forward_flops(shapes) + of_adapters)
    # The encoder and the embedding have no backward; blocks and head need gradients of inputs alone.
    vision, llm = MODEL.modules
    attention = sum(layer.attention.flops(shapes.llm_tokens).sum() for layer in llm.layers if layer.attention)
    products = llm.forward_flops(shapes.llm_tokens).sum() - attention
    encoded = vision.forward_flops(shapes.item_encoder_tokens).sum()
    assert model.training_flops(shapes) == pytest.approx(
        encoded + 2 * products + 3 * attention + TRAINING_FLOPS * of_adapters
    )


def test_a_backward_multiplies_once_for_the_base_and_twice_for_adapters() -> None:
    block = adapted("q_proj").llm.layers[1]
    roofline = Roofline(tiny_cluster(launch_s=0.0))
    loads = compute_loads(adapted("q_proj").llm, np.array([640]), np.array([0, 1]))
    times = roofline.layer_s(block, loads, 1, 1)
    base, mine = (
        sum(float(roofline.gemm_s(gemm, loads.tokens, 1, 1)[0]) for gemm in block.gemms if gemm.adapter is of_adapter)
        for of_adapter in (False, True)
    )
    frozen = MODEL.llm.layers[1].frozen(passes_gradients=True)
    # Scaling and addition read and write five values of each output, as many again in backward times two.
    moved = 2 * 5 * 128 * 640 / roofline._elementwise_bytes_per_s
    plain = roofline.layer_s(frozen, compute_loads(MODEL.llm, np.array([640]), np.array([0, 1])), 1, 1)
    assert float(times.forward_s[0]) == pytest.approx(float(plain.forward_s[0]) + mine + moved)
    assert float(times.backward_s[0]) == pytest.approx(float(plain.backward_s[0]) + 2 * mine + 2 * moved)
    split = roofline.layer_s(block, loads, 1, 1, split=True)
    assert split.weight_s is not None
    assert float(split.weight_s[0]) == pytest.approx(mine)
    assert base > mine


def test_only_adapters_have_gradients_and_states() -> None:
    layout = chain_layout(MODEL, 2, 2, 4, dp=2)
    model = adapted("q_proj")
    placed = layout.module("llm")
    each = RANK * (128 + 128)
    memory = Memory(model)
    learning = memory.learning_parameters(model.llm, placed)
    # An embedding and a block, a block and a head.
    assert learning.tolist() == [each, each]
    weights = 2 * memory.stage_parameters(model.llm, placed)
    # Gradients in fp32, weight and two moments in fp32 on one of two replicas.
    assert memory.stage_state_bytes(model.llm, placed) == pytest.approx(weights + learning * (4 + 12 / 2))


def test_files_of_peft(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    good = {"peft_type": "LORA", "r": 16, "target_modules": ["v_proj", "model.layers.0.q_proj"], "bias": "none"}
    path.write_text(json.dumps(good))
    wanted = ("seed=1", "adapter.rank=16", "adapter.targets=[q_proj,v_proj]", "freeze=[all]")
    assert with_adapter(["seed=1", f"adapter={tmp_path}"]) == with_adapter(["seed=1", f"adapter={path}"]) == wanted
    for changes, message in (
        ({"peft_type": "IA3"}, "peft_type=IA3: must be LORA"),
        ({"r": 0}, "r=0: must be a whole number from 1"),
        ({"target_modules": ".*q_proj"}, "target_modules=.*q_proj: must be a list of names or all-linear"),
        ({"use_dora": True}, "use_dora=True: must be absent, empty or false"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
    ):
        path.write_text(json.dumps(good | changes))
        with pytest.raises(UserError, match=message.replace("*", r"\*")):
            with_adapter([f"adapter={path}"])
    with pytest.raises(UserError, match=r"Leave freeze=\[vision\] out"):
        with_adapter([f"adapter={path}", "freeze=[vision]"])


def test_wrong_names_and_training_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"adapter.targets=llm.qproj: unknown \(did you mean q_proj\?\)"):
        adapted("qproj")
    with pytest.raises(UserError, match=r"adapter.targets=audio.q_proj: must begin with a module of the model"):
        adapted("audio.q_proj")
    options = FrameworkOptions(adapter=Adapter(RANK))
    with pytest.raises(IncompatibleError, match=r"adapter.rank=4: must be 0 with harness=train"):
        options.check_executable(MODEL.llm, 1, "train")
