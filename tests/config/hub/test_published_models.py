"""Published configurations against the classes that wrote them: parameters, image and audio tokens, defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrain_bench.config.hub.files import published_model
from entrain_bench.specs.model import ModelSpec
from entrain_bench_workloads.tokens import audio_items, image_items
from support.published_configs import CASES, MIXTURES

transformers = pytest.importorskip("transformers")
NUM_SIZES = 200
# Read in every run of the tests; the others in `make test WIDE=1`.
QUICK = ("qwen3_vl_8b", "llava_onevision_7b", "qwen2_audio_7b", "qwen2_5_05b")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.wide) for name in CASES]

type TokensOf = Callable[[int, int], int]


def spec_of(name: str, folder: Path) -> ModelSpec:
    return ModelSpec.from_config(published_model(str(CASES[name].write(folder))))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    spec, theirs = spec_of(name, tmp_path), CASES[name].parameters()
    ours = {module.name: module.parameters for module in spec.modules}
    assert ours.keys() == theirs.keys()
    assert sum(ours.values()) == pytest.approx(sum(theirs.values()), rel=0.01)
    assert ours["llm"] == pytest.approx(theirs["llm"], rel=1e-4)
    for module in ours:
        # Positions, class tokens and pooling heads are not counted.
        assert ours[module] == pytest.approx(theirs[module], rel=0.04)


@pytest.mark.wide
@pytest.mark.parametrize("name", MIXTURES)
def test_a_token_meets_as_many_parameters_as_in_the_model(name: str, tmp_path: Path) -> None:
    llm = spec_of(name, tmp_path).llm
    experts = llm.config.experts
    assert experts is not None
    idle = CASES[name].expert_parameters() * (1 - experts.top_k / (experts.count + experts.visual_count))
    assert llm.parameters - llm.active_parameters == pytest.approx(idle, rel=0.01)


def without_tokenizer(cls: type, **attributes: Any) -> Any:
    processor = object.__new__(cls)
    for key, value in attributes.items():
        setattr(processor, key, value)
    return processor


def qwen(folder: Path, cls: str = "Qwen2VLImageProcessorPil") -> TokensOf:
    processor = getattr(transformers, cls).from_pretrained(folder)
    return lambda high, wide: processor.get_number_of_image_patches(high, wide) // 4


def kimi(_: Path) -> TokensOf:
    # The module of the processor needs torchvision, which the arithmetic of sizes does not.
    pytest.importorskip("torchvision")
    from transformers.models.kimi_k25.image_processing_kimi_k25 import navit_resize

    def tokens(high: int, wide: int) -> int:
        _, (padded_high, padded_wide) = navit_resize(high, wide, 14, 2, 16384, 512)
        return padded_high * padded_wide // 28**2

    return tokens


def internvl(folder: Path) -> TokensOf:
    processor = transformers.GotOcr2ImageProcessorPil.from_pretrained(folder)
    return lambda high, wide: 2 + 256 * processor.get_number_of_image_patches(high, wide)


def llava(folder: Path) -> TokensOf:
    images = transformers.CLIPImageProcessorPil.from_pretrained(folder)
    processor = without_tokenizer(
        transformers.LlavaProcessor,
        image_processor=images,
        patch_size=14,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        _merge_kwargs=lambda **_: {"images_kwargs": {}},
    )
    return lambda high, wide: processor._get_num_multimodal_tokens([(high, wide)])["num_image_tokens"][0]


def llava_next(folder: Path) -> TokensOf:
    processor = without_tokenizer(
        transformers.LlavaNextProcessor,
        image_processor=transformers.LlavaNextImageProcessorPil.from_pretrained(folder),
        patch_size=14,
        num_additional_image_tokens=1,
    )
    return lambda high, wide: processor._get_number_of_features(high, wide, 336, 336) - 1


def llava_onevision(folder: Path) -> TokensOf:
    processor = without_tokenizer(
        transformers.LlavaOnevisionProcessor,
        image_processor=transformers.LlavaOnevisionImageProcessorPil.from_pretrained(folder),
        num_image_tokens=729,
        vision_aspect_ratio="anyres_max_9",
    )
    return lambda high, wide: processor._get_number_of_features(high, wide, 384, 384)


def idefics3(folder: Path, seq_len: int, cls: str = "Idefics3ImageProcessorPil") -> TokensOf:
    images = getattr(transformers, cls).from_pretrained(folder)
    processor = without_tokenizer(
        transformers.Idefics3Processor,
        image_processor=images,
        image_seq_len=seq_len,
        # Both line ends are one token, as in the tokenizers of these models.
        tokenizer=lambda *_, **__: {"input_ids": [0]},
        _merge_kwargs=lambda **_: {"images_kwargs": {}},
    )
    return lambda high, wide: processor._get_num_multimodal_tokens([(high, wide)])["num_image_tokens"][0]


def pixtral(folder: Path, patch: int = 16, merge: int = 1) -> TokensOf:
    processor = without_tokenizer(
        transformers.PixtralProcessor,
        image_processor=transformers.PixtralImageProcessorPil.from_pretrained(folder),
        patch_size=patch,
        spatial_merge_size=merge,
        _merge_kwargs=lambda **_: {"images_kwargs": {}},
    )
    return lambda high, wide: processor._get_num_multimodal_tokens([(high, wide)])["num_image_tokens"][0]


def gemma3(_: Path) -> TokensOf:
    processor = without_tokenizer(transformers.Gemma3Processor, image_seq_length=256)
    return lambda high, wide: processor._get_num_multimodal_tokens([(high, wide)])["num_image_tokens"][0]


IMAGE_TOKENS: Mapping[str, Callable[[Path], TokensOf]] = {
    "qwen2_vl_7b": qwen,
    "qwen2_5_vl_7b": qwen,
    "qwen3_vl_8b": qwen,
    "qwen3_omni_30b_a3b": qwen,
    "glm_4_5v": lambda folder: qwen(folder, "Glm4vImageProcessorPil"),
    "ernie_4_5_vl_28b_a3b": lambda folder: qwen(folder, "Ernie4_5_VLMoeImageProcessorPil"),
    "kimi_k25": kimi,
    "internvl3_8b": internvl,
    "llava_1_5_7b": llava,
    "llava_next_mistral_7b": llava_next,
    "llava_onevision_7b": llava_onevision,
    "gemma3_4b": gemma3,
    "smolvlm_2b": lambda folder: idefics3(folder, 81, "SmolVLMImageProcessorPil"),
    "idefics3_8b": lambda folder: idefics3(folder, 169),
    "pixtral_12b": pixtral,
    "mistral_small_3_24b": lambda folder: pixtral(folder, 14, 2),
}
IMAGE_NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.wide) for name in IMAGE_TOKENS]


@pytest.mark.parametrize("name", IMAGE_NAMES)
def test_images_have_the_tokens_of_the_processor(name: str, tmp_path: Path) -> None:
    rules, theirs = spec_of(name, tmp_path).tokens, IMAGE_TOKENS[name](tmp_path)
    rng = np.random.default_rng(0)
    widths = np.rint(np.exp(rng.uniform(np.log(40), np.log(6000), NUM_SIZES)))
    heights = np.clip(np.rint(widths * np.exp(rng.uniform(-1.5, 1.5, NUM_SIZES))), 40, 8000)
    ours = image_items(np.ones(NUM_SIZES, np.int64), widths, heights, rules, 2**20)
    owner = np.repeat(np.arange(NUM_SIZES), ours.counts)
    found = np.bincount(owner, weights=ours.llm_tokens)
    sizes = zip(heights.astype(int).tolist(), widths.astype(int).tolist(), strict=True)
    np.testing.assert_array_equal(found, [theirs(high, wide) for high, wide in sizes])


def test_qwen2_audio_has_the_tokens_of_its_processor(tmp_path: Path) -> None:
    rules = spec_of("qwen2_audio_7b", tmp_path).tokens
    samples = np.random.default_rng(0).integers(2000, 480000, NUM_SIZES)
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(tmp_path)
    frames = -(-samples // extractor.hop_length)
    encoder = transformers.Qwen2AudioEncoder._get_feat_extract_output_lengths
    ours = audio_items(samples / extractor.sampling_rate, rules)
    np.testing.assert_array_equal(ours.llm_tokens, encoder(None, frames)[1])
    assert set(ours.encoder_tokens) == {1500}


@pytest.mark.wide
def test_phi4_has_the_audio_tokens_of_its_processor(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rules = spec_of("phi4_multimodal", tmp_path).tokens
    samples = np.random.default_rng(0).integers(2000, 40 * 16000, NUM_SIZES)
    extractor = transformers.Phi4MultimodalFeatureExtractor()
    frames = (torch.tensor(samples) - extractor.win_length) // extractor.hop_length + 1
    ours = audio_items(samples / extractor.sampling_rate, rules)
    np.testing.assert_array_equal(ours.llm_tokens, extractor._compute_audio_embed_size(frames).numpy())


def test_voxtral_hears_whole_segments(tmp_path: Path) -> None:
    rules = spec_of("voxtral_mini_3b", tmp_path).tokens
    ours = audio_items(np.array([1.0, 30.0, 31.0]), rules)
    assert ours.counts.tolist() == [1, 1, 2]
    assert set(ours.llm_tokens) == {375}


def test_gemma3_attends_in_windows_but_for_every_sixth_layer(tmp_path: Path) -> None:
    config = spec_of("gemma3_4b", tmp_path).llm.config
    assert config.window_tokens == 1024
    assert [*config.full_attention_layers] == [5, 11, 17, 23, 29]


def test_windows_that_are_switched_off_are_none(tmp_path: Path) -> None:
    assert not spec_of("llava_next_mistral_7b", tmp_path).llm.config.window_tokens
