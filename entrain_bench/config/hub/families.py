"""Model families: which encoders, projector, language model and token rules a published configuration has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.config.hub import token_rules
from entrain_bench.config.hub.decoder import FAMILIES as DECODERS
from entrain_bench.config.hub.decoder import language_model
from entrain_bench.config.hub.defaults import DEFAULTS
from entrain_bench.config.hub.encoders import (
    CONFORMER_NAMES,
    NEWER_NAMES,
    OPENAI_NAMES,
    PHI4MM_NAMES,
    conformer,
    product,
    qwen_vision,
    vision_encoder,
    whisper,
)
from entrain_bench.config.hub.fields import Fields

CONFIG = "config.json"
PROCESSOR = "preprocessor_config.json"
CLIP = "clip_vision_model"
SIGLIP = "siglip_vision_model"


@dataclass(frozen=True, slots=True)
class Published:
    """The files of a published model.

    Attributes:
        config: ``config.json``.
        processor: ``preprocessor_config.json``, with what ``processor_config.json`` adds; empty without them.
        other: finds the published model of another name, of which some configurations are made.
    """

    config: Fields
    processor: Fields
    other: Callable[[str], Published]


@dataclass(frozen=True, slots=True)
class Parts:
    """Encoders by name with their projectors, the configuration of the language model, and token rules."""

    encoders: Mapping[str, dict[str, Any]]
    llm: Fields
    llm_type: str
    tokens: Mapping[str, Any]


def model_values(published: Published) -> dict[str, Any]:
    """Modules and token rules of a published model, as a model's YAML states them.

    Raises:
        UserError: naming the field that is missing, wrong or not supported.
    """
    kind = str(published.config.needed("model_type"))
    config = replace(published.config, defaults=DEFAULTS.get(kind, {}))
    published = replace(published, config=config)
    if kind in FAMILIES:
        parts = FAMILIES[kind](published)
    elif kind in DECODERS:
        parts = Parts({}, config, kind, {})
    else:
        raise unknown_choice("model_type", kind, sorted({*FAMILIES, *DECODERS}))
    # As the language model's own part says; otherwise the whole configuration, otherwise the defaults of either.
    said = [*(part for part in (parts.llm, config) if part.values.get("tie_word_embeddings") is not None)]
    said += [*(part for part in (config, parts.llm) if part.defaults.get("tie_word_embeddings") is not None)]
    tied = bool(said) and said[0].flag("tie_word_embeddings")
    modules = {**parts.encoders, "llm": language_model(parts.llm, parts.llm_type, tied)}
    return {"modules": modules, "tokens": {**token_rules.USUAL, **parts.tokens}}


def _text_of(config: Fields, name: str = "text_config") -> tuple[Fields, str]:
    """The language model's part of a configuration and its type."""
    text = config.part(name)
    return text, str(text.needed("model_type"))


# Of a published model, its vision encoder's and its language model's part, and its bare encoder: the encoder with a
# projector, and token rules.
type Built = tuple[dict[str, Any], Mapping[str, Any]]
type Build = Callable[[Published, Fields, Fields, dict[str, Any]], Built]


def _vision_family(
    build: Build, vision_type: str, published: Published, exact: bool = False, llm: str = "text_config"
) -> Parts:
    """A model with one vision transformer, of a type by default or, if older files state another one, ``exact``."""
    config = published.config
    vision = (config.part_as if exact else config.part)("vision_config", vision_type)
    text, kind = _text_of(config, llm)
    encoder, tokens = build(published, vision, text, vision_encoder(vision, vision_type))
    return Parts({"vision": encoder}, text, kind, tokens)


def with_projector(encoder: dict[str, Any], *products: dict[str, Any], norm: bool = False) -> dict[str, Any]:
    """An encoder with the products of its projector."""
    return {**encoder, "head_gemms": [*products], "head_norm": norm}


def _two_layers(encoder: dict[str, Any], width: int, rows: float = 1.0, stacked: int = 1) -> dict[str, Any]:
    """An encoder with two linear layers onto the LLM."""
    return with_projector(
        encoder, product(encoder["hidden_size"] * stacked, width, rows), product(width, width, rows), norm=True
    )


def _feature_layers(config: Fields) -> int:
    """How many layers' outputs a projector is given side by side."""
    layers = config.get("vision_feature_layer")
    return len(layers) if isinstance(layers, list) else 1


def _side(published: Published, vision: Fields) -> int:
    """Patches on a side of the square that a processor resizes images to."""
    return token_rules.patches_a_side(token_rules.tile_side(published.processor), vision)


def _llava(published: Published, vision: Fields, text: Fields, encoder: dict[str, Any]) -> Built:
    config = published.config
    encoder = _two_layers(encoder, text.integer("hidden_size"), stacked=_feature_layers(config))
    if vision.get("model_type") == "pixtral":
        return encoder, token_rules.native_size(published.processor, vision, 1)
    tokens = _side(published, vision) ** 2 + _has_class_token(vision)
    keeps_all = config.choice("vision_feature_select_strategy", ("default", "full")) == "full"
    rules = token_rules.fixed(tokens, tokens - (not keeps_all))
    return encoder, {**rules, "patch_pixels": vision.square("patch_size")}


def _has_class_token(vision: Fields) -> bool:
    return str(vision.get("model_type") or CLIP) == CLIP


def _llava_grids(published: Published, vision: Fields, text: Fields, encoder: dict[str, Any]) -> Built:
    config = published.config
    encoder = _two_layers(encoder, text.integer("hidden_size"), stacked=_feature_layers(config))
    tokens = token_rules.any_resolution(published.processor, config, vision, _has_class_token(vision))
    return {**encoder, "modalities": ["image", "video"] if "frames" in tokens else ["image"]}, tokens


def _mistral3(published: Published, vision: Fields, text: Fields, encoder: dict[str, Any]) -> Built:
    config = published.config
    merge = config.integer("spatial_merge_size")
    width = text.integer("hidden_size")
    own = encoder["hidden_size"]
    rows = 1 / merge**2
    sizes = ((own * merge**2, own), (own * _feature_layers(config), width), (width, width))
    encoder = with_projector(encoder, *(product(k, n, rows) for k, n in sizes), norm=True)
    return encoder, token_rules.native_size(published.processor, vision, merge)


def _gemma3(published: Published, vision: Fields, text: Fields, encoder: dict[str, Any]) -> Built:
    published.processor.refuse("do_pan_and_scan", "is not supported; must be false")
    tokens = published.config.integer("mm_tokens_per_image")
    patches = _side(published, vision) ** 2
    projected = product(encoder["hidden_size"], text.integer("hidden_size"), tokens / patches)
    return with_projector(encoder, projected, norm=True), token_rules.fixed(patches, tokens)


def _paligemma(published: Published, vision: Fields, _: Fields, encoder: dict[str, Any]) -> Built:
    patches = _side(published, vision) ** 2
    projected = product(encoder["hidden_size"], published.config.integer("projection_dim"))
    return with_projector(encoder, projected, norm=True), token_rules.fixed(patches, patches)


def _idefics3(published: Published, vision: Fields, text: Fields, encoder: dict[str, Any]) -> Built:
    scale = published.config.integer("scale_factor")
    shuffled = product(encoder["hidden_size"] * scale**2, text.integer("hidden_size"), 1 / scale**2)
    tokens = token_rules.longest_edge(published.processor, vision, scale)
    return with_projector(encoder, shuffled, norm=True), tokens


def _idefics2(published: Published, vision: Fields, text: Fields, encoder: dict[str, Any]) -> Built:
    resampler = published.config.part_as("perceiver_config", "idefics2_perceiver")
    width = text.integer("hidden_size")
    ffn = text.integer("intermediate_size")
    tokens = token_rules.resampled(published.processor, vision, resampler.integer("resampler_n_latents"))
    rules = tokens["images"]
    # Latents for each patch of a large image.
    rows = rules["llm_tokens"] / (rules["longest_edge"] // rules["pixels"]) ** 2
    head = resampler.integer("resampler_head_dim")
    queries, keys = (head * resampler.integer(name) for name in ("resampler_n_heads", "num_key_value_heads"))
    layer = [
        product(width, queries, rows),
        product(width, 2 * keys),
        product(queries, width, rows),
        product(width, 8 * width, rows),
        product(4 * width, width, rows),
    ]
    projection = [product(encoder["hidden_size"], 2 * ffn), product(ffn, width)]
    layers = layer * resampler.integer("resampler_depth")
    return with_projector(encoder, *projection, *layers, norm=True), tokens


def _internvl(published: Published, vision: Fields, text: Fields, encoder: dict[str, Any]) -> Built:
    processor = published.processor
    ratio = published.config.number("downsample_ratio")
    limits = processor.integer("max_patches"), processor.integer("min_patches")
    pixels = token_rules.tile_side(processor)
    # Models ask the processor for an overview in every call.
    tokens = token_rules.nearest_grid(*limits, pixels, vision.square("patch_size"), ratio, has_overview=True)
    return _shuffled(encoder, text, ratio), tokens


def _internvl_chat(published: Published, vision: Fields, text: Fields, encoder: dict[str, Any]) -> Built:
    config = published.config
    ratio = config.number("downsample_ratio")
    dynamic = config.flag("dynamic_image_size")
    most, least = (config.integer(f"{end}_dynamic_patch") if dynamic else 1 for end in ("max", "min"))
    has_overview = config.flag("use_thumbnail") or most == 1
    pixels = config.integer("force_image_size")
    tokens = token_rules.nearest_grid(most, least, pixels, vision.square("patch_size"), ratio, has_overview)
    return _shuffled(encoder, text, ratio), tokens


def _shuffled(encoder: dict[str, Any], text: Fields, ratio: float) -> dict[str, Any]:
    """InternVL's encoder: patches are merged by pixel shuffle, then two linear layers."""
    encoder = _two_layers(encoder, text.integer("hidden_size"), ratio**2, round(1 / ratio**2))
    return {**encoder, "modalities": ["image", "video"]}


def _qwen_vl(published: Published) -> Parts:
    config = published.config
    kind = str(published.config.get("model_type"))
    vision = config.part_as("vision_config", f"{kind}_vision")
    # Older configurations have the language model's fields at the top.
    nested = config.get("text_config") is not None
    text = config.part("text_config") if nested else config
    text = replace(text, defaults=DEFAULTS[f"{kind}_text"])
    tokens = token_rules.qwen_images(published.processor, vision)
    return Parts({"vision": qwen_vision(vision, kind)}, text, f"{kind}_text", tokens)


def _phi4(published: Published) -> Parts:
    config = published.config
    vision = config.part_as("vision_config", "phi4_multimodal_vision")
    audio = config.part_as("audio_config", "phi4_multimodal_audio")
    heard = conformer(audio, CONFORMER_NAMES, audio.integer("nemo_conv_channels"))
    pixels = token_rules.tile_side(published.processor)
    rate = audio.integer("downsample_rate")
    return _phi4_parts(published, vision, pixels, heard, rate * audio.integer("time_reduction"))


def _phi4mm(published: Published) -> Parts:
    """Phi-4-multimodal as its authors publish it; its vision encoder is fixed in their code."""
    config = published.config
    vision = Fields({}, CONFIG, defaults=DEFAULTS["phi4_multimodal_vision"])
    audio = config.part("audio_processor").part("config")
    channels = audio.part("nemo_conv_settings").integer("conv_channels")
    embedding = config.part("embd_layer")
    pixels = embedding.part("image_embd_layer").integer("crop_size")
    rate = embedding.part("audio_embd_layer").integer("downsample_rate") * audio.integer("time_reduction")
    return _phi4_parts(published, vision, pixels, conformer(audio, PHI4MM_NAMES, channels), rate)


def _phi4_parts(published: Published, vision: Fields, pixels: int, heard: dict[str, Any], rate: int) -> Parts:
    """Phi-4-multimodal with tiles of ``pixels``, and a token of ``rate`` spectrogram frames."""
    config = published.config
    width = config.integer("hidden_size")
    # Speech has a projector of its own, and another one next to images.
    projector = [product(heard["hidden_size"], width), product(width, width)]
    encoders = {
        "vision": _two_layers(vision_encoder(vision, "phi4_multimodal_vision"), width, 0.25),
        "audio": with_projector(heard, *projector, *projector),
    }
    tokens = token_rules.padded_grid(published.processor, pixels, vision.square("patch_size"))
    return Parts(encoders, config, "phi4_multimodal", tokens | token_rules.conformer_audio(rate))


def _qwen2_audio(published: Published) -> Parts:
    config = published.config
    audio = config.part("audio_config", "qwen2_audio_encoder")
    text, kind = _text_of(config)
    heard = whisper(audio, OPENAI_NAMES)
    heard = with_projector(heard, product(heard["hidden_size"], text.integer("hidden_size"), 0.5), norm=True)
    return Parts({"audio": heard}, text, kind, token_rules.whisper_audio(2))


def _voxtral(published: Published) -> Parts:
    config = published.config
    audio = config.part("audio_config", "voxtral_encoder")
    text, kind = _text_of(config)
    heard = whisper(audio, NEWER_NAMES)
    stacked = audio.integer("intermediate_size")
    rows = heard["hidden_size"] / stacked
    width = text.integer("hidden_size")
    heard = with_projector(heard, product(stacked, width, rows), product(width, width, rows), norm=True)
    tokens = token_rules.whisper_audio(round(1 / rows), pads_llm=True)
    return Parts({"audio": heard}, text, kind, tokens)


def _ultravox(published: Published) -> Parts:
    config = published.config
    audio = _named(published, "audio")
    text = _named(published, "text")
    if audio.get("model_type") != "whisper":
        raise unknown_choice(f"{audio.path}model_type", str(audio.get("model_type")), ["whisper"])
    heard = whisper(audio, OPENAI_NAMES)
    stack = config.integer("stack_factor")
    middle = config.integer("hidden_size")
    gated = config.get("projector_act") == "swiglu"
    products = (
        product(heard["hidden_size"] * stack, middle, 1 / stack),
        product(middle // 2 if gated else middle, text.integer("hidden_size"), 1 / stack),
    )
    # The processor rounds to whole encoder tokens, 50 a second, and the last stack is filled up.
    rules = {"frames_per_s": 50.0, "window_s": 0.01, "encoder_steps": [], "llm_steps": [[1, stack, 0]]}
    tokens = {"audio": rules, "audio_segment_s": 30.0, "audio_merge_frames": stack}
    kind = str(text.needed("model_type"))
    return Parts({"audio": with_projector(heard, *products, norm=True)}, text, kind, tokens)


def _named(published: Published, part: str) -> Fields:
    """A part that a configuration holds, or names as another published model."""
    held = published.config.get(f"{part}_config")
    name = published.config.get(f"{part}_model_id")
    if not (isinstance(held, Mapping) and held.get("model_type")) and name:
        found = published.other(str(name)).config
        return replace(found, defaults=DEFAULTS.get(str(found.get("model_type")), {}))
    return published.config.part(f"{part}_config")


def _whisper_alone(published: Published) -> Parts:
    kind = published.config.get("model_type")
    raise UserError(f"model_type={kind}: has cross-attention, which is not supported; use a model with an LLM")


FAMILIES: Mapping[str, Callable[[Published], Parts]] = {
    "gemma3": partial(_vision_family, _gemma3, SIGLIP),
    "idefics2": partial(_vision_family, _idefics2, "idefics2_vision", exact=True),
    "idefics3": partial(_vision_family, _idefics3, "idefics3_vision", exact=True),
    "internvl": partial(_vision_family, _internvl, "internvl_vision"),
    "internvl_chat": partial(_vision_family, _internvl_chat, "intern_vit_6b", llm="llm_config"),
    "llava": partial(_vision_family, _llava, CLIP),
    "llava_next": partial(_vision_family, _llava_grids, CLIP),
    "llava_onevision": partial(_vision_family, _llava_grids, CLIP),
    "mistral3": partial(_vision_family, _mistral3, "pixtral"),
    "paligemma": partial(_vision_family, _paligemma, SIGLIP),
    "phi4_multimodal": _phi4,
    "phi4mm": _phi4mm,
    "qwen2_audio": _qwen2_audio,
    "qwen2_vl": _qwen_vl,
    "qwen2_5_vl": _qwen_vl,
    "qwen3_vl": _qwen_vl,
    "smolvlm": partial(_vision_family, _idefics3, "idefics3_vision", exact=True),
    "ultravox": _ultravox,
    "voxtral": _voxtral,
    "whisper": _whisper_alone,
}
