"""Models: every YAML, published parameter counts, hand-worked costs of a layer, and errors."""

from pathlib import Path

import numpy as np
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.config.tree import config_tree
from entrain_bench.specs.layer import Attention
from entrain_bench.specs.model import SELECTIVE, ModelSpec
from entrain_bench.specs.module_layers import Role
from entrain_bench.specs.shapes import shapes_from_lists
from support.builders import tiny_model
from support.specs import changed, load, model

CONFIGS = config_tree()
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))


@pytest.mark.wide
@pytest.mark.parametrize("name", MODELS)
def test_every_model_composes_and_parses(name: str) -> None:
    spec = model(name)
    assert spec.name == name
    assert spec.modules == (*spec.encoders, spec.llm, *spec.generators)
    assert spec.llm.role is Role.LLM
    for encoder in spec.encoders:
        assert encoder.is_encoder
        projected = encoder.layers[-1].gemms[-1]
        assert projected.n == spec.llm.config.hidden_size
        merge = spec.tokens.audio_merge_frames if "audio" in encoder.config.modalities else spec.tokens.merge_patches**2
        assert projected.rows_per_token == 1 / merge
    for module in spec.modules:
        assert module.config.source
        assert module.config.unet or len(module.layers) == module.config.num_layers + 2


@pytest.mark.parametrize(
    "path",
    [*(CONFIGS / "model" / "module").glob("*.yaml"), *(CONFIGS / "model_family").glob("*.yaml")],
    ids=lambda path: path.stem,
)
def test_every_module_is_used(path: Path) -> None:
    assert any(path.stem in other.read_text() for other in CONFIGS.glob("model*/**/*.yaml") if other != path)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "module", "parameters"),
    [
        # Tensor sizes of the Hugging Face checkpoints.
        ("qwen25vl_llama3_1b", "llm", 1_235_814_400),
        ("qwen25vl_llama3_3b", "llm", 3_212_749_824),
        ("qwen25vl_llama3_8b", "llm", 8_030_261_248),
        ("whisper_qwen25_7b", "llm", 7_615_616_512),
        ("llavaov_qwen25_32b", "llm", 32_763_876_352),
        ("llavaov_qwen25_72b", "llm", 72_706_203_648),
        ("llavaov_llama3_70b", "llm", 70_553_706_496),
        ("vit1b_llm14b", "llm", 14_770_033_664),
        ("vit3b_llm32b", "llm", 32_763_876_352),
        ("vit1b_llm70b", "llm", 70_553_706_496),
        ("vit3b_llm120b", "llm", 122_610_069_504),
    ],
)
def test_llm_parameters_match_the_checkpoint(name: str, module: str, parameters: int) -> None:
    assert model(name).module(module).parameters == parameters


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "billions"),
    # The sizes arXiv:2605.27678 states; ViT-g/14 has 1011M (arXiv:2106.04560), InternViT-6B 5903M (arXiv:2312.14238).
    [
        ("vit1b_llm7b", 1.01),
        ("vit3b_llm32b", 3.06),
        ("vit6b_llm120b", 5.90),
        ("vit7b_llm120b", 7.25),
        ("vit12b_llm120b", 12.24),
        # arXiv:2504.14145 calls them 5B and 22B; EVA-02-CLIP-E has 4.4B in 64 blocks (arXiv:2303.15389), ViT-22B 21.7B.
        ("vlm_s", 4.28),
        ("vlm_l", 21.75),
    ],
)
def test_encoders_have_the_stated_size_without_projector_and_divide_by_8(name: str, billions: float) -> None:
    encoder = model(name).modules[0]
    assert (encoder.parameters - encoder.layers[-1].parameters) / 1e9 == pytest.approx(billions, abs=0.005)
    assert encoder.config.num_heads % 8 == encoder.config.ffn_hidden_size % 8 == 0


def test_vision_parameters_match_the_checkpoint() -> None:
    config = load("model", "qwen25vl_llama3_1b")
    # Qwen2.5-VL-7B projects to 3584: 8,292,166,656 parameters in all, 7,615,616,512 of them in the LLM.
    config["modules"]["vision"]["head_gemms"][-1]["n"] = 3584
    assert ModelSpec.from_config(config).module("vision").parameters == 676_550_144


def test_audio_parameters_match_the_checkpoint() -> None:
    spec = model("whisper_qwen25_7b")
    # whisper-large-v3's encoder; the checkpoint counts 1500 fixed positions and has no bias on keys (see the YAML).
    adapter = 1280 * 3584 + 3584
    assert spec.module("audio").parameters == 636_968_960 - 1500 * 1280 + 32 * 1280 + adapter


def test_siglip_parameters_match_the_checkpoint() -> None:
    spec = model("llavaov_400m_llama3_8b").module("vision")
    # siglip-so400m-patch14-384's vision tower has 428,225,600; without a layer, positions, final norm and pooling head
    # (probe, attention, norm, MLP), with LLaVA-OneVision's projector.
    attention, mlp = 4 * (1152 * 1152 + 1152), 2 * 1152 * 4304 + 4304 + 1152
    left_out = (attention + mlp + 4 * 1152) + 729 * 1152 + 2 * 1152 + (1152 + attention + 2 * 1152 + mlp)
    assert spec.parameters == 428_225_600 - left_out + 1152 * 4096 + 4096 + 4096 * 4096 + 4096


@pytest.mark.parametrize(
    ("name", "layers", "width", "inner"),
    [("llavaov_1b_llama3_8b", 27, 1728, 6912), ("llavaov_llama3_8b", 40, 2304, 8608)],
)
def test_dflops_encoders_by_hand(name: str, layers: int, width: int, inner: int) -> None:
    encoder = model(name).module("vision")
    block = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    projector = width * 4096 + 4096 + 4096 * 4096 + 4096
    assert encoder.parameters == 588 * width + width + layers * block + projector
    assert encoder.config.num_heads * encoder.config.head_dim == width


def test_an_embedding_of_patches_reads_them_and_writes_hidden_states() -> None:
    # Patches of 96 values, hidden states of 64.
    embed = tiny_model().encoders[0].layers[0]
    assert embed.elementwise_bytes_per_token == 2 * (96 + 64)


def test_flops_of_a_llama_1b_block() -> None:
    block = model("qwen25vl_llama3_1b").llm.layers[1]
    # Per token: QKV 2 * 2048 * (2048 + 2 * 512), output 2 * 2048^2, gate and up 2 * 2048 * 16384, down 2 * 8192 * 2048.
    per_token = 12_582_912 + 8_388_608 + 67_108_864 + 33_554_432
    # Causal attention: 4 * 2048 * length^2 / 2.
    lengths = np.array([1, 100, 4096])
    assert block.forward_flops(lengths) == pytest.approx(per_token * lengths + 4096.0 * lengths.astype(float) ** 2)
    assert sum(gemm.flops(np.array(1.0)) for gemm in block.gemms) == 2 * (block.parameters - 2 * 2048)


def test_activation_bytes_of_a_llama_1b_block() -> None:
    block = model("qwen25vl_llama3_1b").llm.layers[1]
    # bf16: inputs and outputs of two norms, queries and attention output, keys and values, gate and up, their product;
    # fp32: a number for each of 32 heads.
    split = 2 * (2 * 2048 + 2 * 512 + 16384 + 8192)
    assert block.activation_bytes_per_token == 2 * 4 * 2048 + split + 4 * 32
    assert block.input_bytes_per_token == 2 * 2048
    # Sequence parallelism decides whether tensor parallelism divides the hidden states; fp32 weights double bf16 only.
    assert block.kept_bytes(1, False) == block.activation_bytes_per_token
    assert block.kept_bytes(4, True) == (2 * 4 * 2048 + split) / 4 + 4 * 8
    assert block.kept_bytes(4, False) == 2 * 4 * 2048 + split / 4 + 4 * 8
    assert block.kept_bytes(4, False, 4) == 2 * (2 * 4 * 2048 + split / 4) + 4 * 8
    assert [block.held_bytes(4, split) for split in (True, False)] == [1024, 4096]
    assert block.working_bytes(4) == 2 * (16384 + 8192) / 4


def test_selective_recomputation_covers_the_mlp_of_a_llama_1b_block() -> None:
    whole = model("qwen25vl_llama3_1b")
    block = whole.with_recomputation(SELECTIVE).llm.layers[1]
    assert block.remade is not None
    # Kept all the same: both norms' inputs, the first's output, queries, keys, values, attention's result.
    attention = 2 * (2 * 2048 + 2 * 512)
    assert block.kept_bytes(1, True) == whole.llm.layers[1].kept_bytes(1, True)
    assert block.remade_from_bytes_per_token == 2 * 3 * 2048 + attention + 4 * 32
    assert block.held_bytes(1, True) == block.remade_from_bytes_per_token
    assert block.held_bytes(4, True) == (2 * 3 * 2048 + attention) / 4 + 4 * 8
    assert block.held_bytes(4, False) == 2 * 3 * 2048 + attention / 4 + 4 * 8
    # Run again: the second norm, gate and up, their product, down; the rest of the FLOPs are attention's products.
    assert block.recomputed_bytes(4, True) == 2 * (2048 + 16384 + 8192) / 4
    flops = 67_108_864 + 33_554_432
    assert block.remade.forward_flops(np.array([1])) == flops
    assert block.remade_share == pytest.approx(flops / (flops + 12_582_912 + 8_388_608))
    assert whole.llm.layers[1].remade_share == 1.0
    for still in (whole.llm.layers[0], whole.llm.layers[-1]):
        assert still.remade_share == 0.0
        assert still.recomputed_bytes(4, True) == 0.0


def test_windows_bound_attention() -> None:
    window = Attention(1280, 1280, causal=False, window_tokens=64)
    assert window.flops(np.array([32, 64, 6400])).tolist() == [
        4 * 1280 * 32 * 32,
        4 * 1280 * 64 * 64,
        4 * 1280 * 6400 * 64,
    ]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("modules/llm/num_layer", 3, "did you mean num_layers"),
        ("modules/llm/num_kv_heads", 3, "model.modules.llm.num_kv_heads=3: must be a divisor of num_heads=8"),
        ("modules/llm/hidden_size", 0, "model.modules.llm.hidden_size=0: must be at least 1"),
        ("modules/llm/source", None, "model.modules.llm.source: missing"),
        ("modules/vision/role", "llm", "model.modules.vision.vocab_size=0"),
        ("modules/vision/modalities", [], "model.modules.vision.modalities=[]: must be at least one modality"),
        ("modules/vision/full_attention_layers", [99], "full_attention_layers=[99]: must be layers in 0.."),
        ("modules/vision/head_gemms/0/rows", 1, "head_gemms[0] key=rows: unknown"),
        ("modules/llm", None, "must be encoders and exactly one llm"),
        ("tokens/patch_pixels", 0, "model.tokens.patch_pixels=0: must be positive"),
    ],
)
def test_bad_models_are_named(path: str, value: object, message: str) -> None:
    with pytest.raises(UserError) as error:
        ModelSpec.from_config(changed(load("model", "tiny"), path, value))
    assert message in str(error.value)


def test_shapes_that_a_model_cannot_take() -> None:
    spec = model("tiny")
    with pytest.raises(UserError, match="has audio items"):
        spec.check_shapes(shapes_from_lists(["audio"], [(1, [("audio", 10, 5)])]))
    with pytest.raises(UserError, match="131073 LLM tokens"):
        spec.check_shapes(shapes_from_lists(["image"], [(5, []), (131073, [])]))
    spec.check_shapes(shapes_from_lists(["image", "audio"], [(131072, [])]))


def test_a_vocabulary_is_padded_to_what_ranks_can_share() -> None:
    llm = tiny_model(llm=2, vocab_size=1001).llm
    # 8 heads, 4 key-value heads: TP of 8 splits the heads only. The odd vocabulary hinders none.
    assert [tp for tp in (1, 2, 3, 4, 8) if llm.splits_into(tp)] == [1, 2, 4]
    assert llm.padded(1) is llm
    even = tiny_model(llm=2, vocab_size=1000).llm
    assert even.padded(4) is even
    # Up to a multiple of 128 x 4: 1,024 words, 23 more rows of 128 in the embedding and in the head.
    padded = llm.padded(4)
    assert padded is llm.padded(4)
    assert padded.config.vocab_size == 1024
    assert llm.padded(8).config.vocab_size == 1024
    assert tiny_model(vocab_size=1025).llm.padded(8).config.vocab_size == 2048
    assert padded.parameters - llm.parameters == 2 * 23 * 128
    assert padded.layers[1:-1] == llm.layers[1:-1]
