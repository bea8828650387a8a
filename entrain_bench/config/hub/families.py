"""Model families: which encoders, projector, language model and token rules a published configuration has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from entrain_bench.base.errors import require, unknown_choice
from entrain_bench.config.hub import token_rules
from entrain_bench.config.hub.decoders import FAMILIES as DECODERS
from entrain_bench.config.hub.decoders import language_model
from entrain_bench.config.hub.fields import Fields, class_defaults
from entrain_bench.config.hub.modules import (
    CONFORMER_NAMES,
    NEWER_NAMES,
    OPENAI_NAMES,
    PHI4MM_NAMES,
    conformer,
    ernie_vision,
    glm_vision,
    moon_vision,
    omni_audio,
    product,
    qwen_vision,
    vision_encoder,
    whisper,
)

CONFIG = "config.json"
PROCESSOR = "preprocessor_config.json"
CLIP = "clip_vision_model"
# Types whose whole configuration says if embeddings are tied, not the part of the language model.
WHOLE_TIES = ("ernie4_5_vl_moe", "glm4v", "glm4v_moe", "kimi_k25", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe")


@dataclass(frozen=True, slots=True)
class Parts:
    """Encoders by name with their projectors, the configuration of the language model, its type, and token rules."""

    encoders: Mapping[str, dict[str, Any]]
    llm: Fields
    llm_type: str
    tokens: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class VisionModel:
    """A model with one vision transformer; its encoder is still without a projector."""

    config: Fields
    processor: Fields
    vision: Fields
    encoder: dict[str, Any]
    width: int  # of the LLM
    ffn: int

    @property
    def side(self) -> int:
        """Patches on a side of the square that the processor resizes images to."""
        return token_rules.tile_side(self.processor) // self.vision.square("patch_size")

    @property
    def feature_layers(self) -> int:
        """How many layers' outputs the projector is given side by side."""
        layers = self.config.get("vision_feature_layer")
        return len(layers) if isinstance(layers, list) else 1

    @property
    def has_class_token(self) -> bool:
        """Whether the encoder adds a token to the patches."""
        return str(self.vision.get("model_type") or CLIP) == CLIP


def model_values(config: Fields, processor: Fields) -> dict[str, Any]:
    """Modules and token rules of a published model as in a YAML; ``UserError`` names a field that does not fit."""
    kind = str(config.needed("model_type"))
    config = replace(config, defaults=class_defaults(kind))
    if not processor.values and kind in token_rules.PUBLISHED:
        processor = replace(processor, values=token_rules.PUBLISHED[kind])
    if kind in VISION_FAMILIES:
        parts = _with_vision(config, processor, *VISION_FAMILIES[kind])
    elif kind in FAMILIES:
        parts = FAMILIES[kind](config, processor)
    elif kind in DECODERS:
        parts = Parts({}, config, kind, {})
    else:
        raise unknown_choice("model_type", kind, sorted({*VISION_FAMILIES, *FAMILIES, *DECODERS}))
    # The language model's own part decides, in newer classes the whole configuration; then the defaults of either.
    order = (config, parts.llm) if kind in WHOLE_TIES else (parts.llm, config)
    said = [part for part in order if part.values.get("tie_word_embeddings") is not None]
    said += [part for part in (config, parts.llm) if part.defaults.get("tie_word_embeddings") is not None]
    tied = bool(said) and said[0].flag("tie_word_embeddings")
    modules = {**parts.encoders, "llm": language_model(parts.llm, parts.llm_type, tied)}
    return {"modules": modules, "tokens": {**token_rules.USUAL, **parts.tokens}}


type Built = tuple[dict[str, Any], Mapping[str, Any]]
type Build = Callable[[VisionModel], Built]


def _with_vision(config: Fields, processor: Fields, build: Build, vision_type: str, exact: bool, llm: str) -> Parts:
    vision = (config.part_as if exact else config.part)("vision_config", vision_type)
    text = config.part(llm)
    kind = str(text.needed("model_type"))
    bare = vision_encoder(vision, vision_type)
    width = text.integer("hidden_size")
    model = VisionModel(config, processor, vision, bare, width, text.integer("intermediate_size"))
    encoder, tokens = build(model)
    return Parts({"vision": encoder}, text, kind, tokens)


def with_projector(encoder: dict[str, Any], *products: dict[str, Any], norm: bool = True) -> dict[str, Any]:
    """An encoder with the products of its projector."""
    return {**encoder, "head_gemms": [*products], "head_norm": norm}


def _two_layers(encoder: dict[str, Any], width: int, rows: float = 1.0, stacked: int = 1) -> dict[str, Any]:
    first = product(encoder["hidden_size"] * stacked, width, rows)
    return with_projector(encoder, first, product(width, width, rows))


def _llava(model: VisionModel) -> Built:
    encoder = _two_layers(model.encoder, model.width, stacked=model.feature_layers)
    if model.vision.get("model_type") == "pixtral":
        return encoder, token_rules.native_size(model.processor, model.vision, 1)
    tokens = model.side**2 + model.has_class_token
    rules = token_rules.fixed(tokens, tokens - (not token_rules.keeps_all(model.config)))
    return encoder, {**rules, "patch_pixels": model.vision.square("patch_size")}


def _llava_grids(model: VisionModel) -> Built:
    encoder = _two_layers(model.encoder, model.width, stacked=model.feature_layers)
    tokens = token_rules.any_resolution(model.processor, model.config, model.vision, model.has_class_token)
    return {**encoder, "modalities": ["image", "video"] if "frames" in tokens else ["image"]}, tokens


def _mistral3(model: VisionModel) -> Built:
    merge = model.config.integer("spatial_merge_size")
    own = model.encoder["hidden_size"]
    rows = 1 / merge**2
    sizes = ((own * merge**2, own), (own * model.feature_layers, model.width), (model.width, model.width))
    encoder = with_projector(model.encoder, *(product(k, n, rows) for k, n in sizes))
    return encoder, token_rules.native_size(model.processor, model.vision, merge)


def _gemma3(model: VisionModel) -> Built:
    model.processor.refuse("do_pan_and_scan", "is not supported; must be false")
    tokens = model.config.integer("mm_tokens_per_image")
    patches = model.side**2
    projected = product(model.encoder["hidden_size"], model.width, tokens / patches)
    return with_projector(model.encoder, projected), token_rules.fixed(patches, tokens)


def _paligemma(model: VisionModel) -> Built:
    patches = model.side**2
    projected = product(model.encoder["hidden_size"], model.config.integer("projection_dim"))
    return with_projector(model.encoder, projected), token_rules.fixed(patches, patches)


def _idefics3(model: VisionModel) -> Built:
    scale = model.config.integer("scale_factor")
    shuffled = product(model.encoder["hidden_size"] * scale**2, model.width, 1 / scale**2)
    return with_projector(model.encoder, shuffled), token_rules.longest_edge(model.processor, model.vision, scale)


def _idefics2(model: VisionModel) -> Built:
    resampler = model.config.part_as("perceiver_config", "idefics2_perceiver")
    width = model.width
    tokens = token_rules.resampled(model.processor, model.vision, resampler.integer("resampler_n_latents"))
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
    projection = [product(model.encoder["hidden_size"], 2 * model.ffn), product(model.ffn, width)]
    return with_projector(model.encoder, *projection, *layer * resampler.integer("resampler_depth")), tokens


def _internvl(model: VisionModel) -> Built:
    ratio = model.config.number("downsample_ratio")
    limits = model.processor.integer("max_patches"), model.processor.integer("min_patches")
    pixels = token_rules.tile_side(model.processor)
    # Models ask the processor for an overview in every call.
    return _shuffled(model, ratio), token_rules.nearest_grid(*limits, pixels, model.vision, ratio, has_overview=True)


def _internvl_chat(model: VisionModel) -> Built:
    config = model.config
    ratio = config.number("downsample_ratio")
    dynamic = config.flag("dynamic_image_size")
    most, least = (config.integer(f"{end}_dynamic_patch") if dynamic else 1 for end in ("max", "min"))
    has_overview = config.flag("use_thumbnail") or most == 1
    pixels = config.integer("force_image_size")
    return _shuffled(model, ratio), token_rules.nearest_grid(
        most, least, pixels, model.vision, ratio, has_overview, divided=True
    )


def _shuffled(model: VisionModel, ratio: float) -> dict[str, Any]:
    encoder = _two_layers(model.encoder, model.width, ratio**2, round(1 / ratio**2))
    return {**encoder, "modalities": ["image", "video"]}


def _qwen_vl(config: Fields, processor: Fields) -> Parts:
    kind = str(config.get("model_type"))
    vision = config.part_as("vision_config", f"{kind}_vision")
    # Older configurations have the language model's fields at the top.
    text = config if config.get("text_config") is None else config.part("text_config")
    text = replace(text, defaults=class_defaults(f"{kind}_text"))
    tokens = token_rules.qwen_images(processor, vision) | token_rules.qwen_video(processor, kind)
    return Parts({"vision": qwen_vision(vision, kind)}, text, f"{kind}_text", tokens)


def _qwen_omni(config: Fields, processor: Fields) -> Parts:
    """The part that understands (the "thinker"); the speech model is not trained with it and left out."""
    held = config.get("thinker_config")
    thinker = config if held is None else config.part("thinker_config")
    vision = thinker.part_as("vision_config", "qwen3_omni_moe_vision_encoder")
    audio = thinker.part_as("audio_config", "qwen3_omni_moe_audio_encoder")
    text = thinker.part_as("text_config", "qwen3_omni_moe_text")
    encoders = {"vision": qwen_vision(vision, "qwen3_omni_moe"), "audio": omni_audio(audio)}
    window = audio.integer("n_window")
    require(window == 50, audio.named("n_window"), window, "50: pieces of one second")
    tokens = token_rules.qwen_images(processor, vision) | token_rules.omni_audio()
    return Parts(encoders, text, "qwen3_omni_moe_text", tokens)


def _glm_vl(config: Fields, processor: Fields) -> Parts:
    kind = str(config.get("model_type"))
    vision = config.part_as("vision_config", f"{kind}_vision")
    text = config.part_as("text_config", f"{kind}_text")
    tokens = token_rules.qwen_images(processor, vision, limited_frames=vision.integer("temporal_patch_size"))
    return Parts({"vision": glm_vision(vision)}, text, f"{kind}_text", tokens)


def _ernie_vl(config: Fields, processor: Fields) -> Parts:
    vision = config.part_as("vision_config", "ernie4_5_vl_moe_vision")
    text = config if config.get("text_config") is None else config.part("text_config")
    text = replace(text, defaults=class_defaults("ernie4_5_vl_moe_text"))
    encoder = ernie_vision(vision, text.integer("hidden_size"))
    tokens = token_rules.qwen_images(processor, vision, frames=1)
    return Parts({"vision": encoder}, text, "ernie4_5_vl_moe_text", tokens)


def _kimi_vl(config: Fields, processor: Fields) -> Parts:
    vision = config.part_as("vision_config", "kimi_k25_vision")
    text = config.part("text_config")
    encoder = moon_vision(vision, text.integer("hidden_size"))
    kind = str(text.needed("model_type"))
    return Parts({"vision": encoder}, text, kind, token_rules.moon_images(processor, vision))


def _phi4(config: Fields, processor: Fields) -> Parts:
    vision = config.part_as("vision_config", "phi4_multimodal_vision")
    audio = config.part_as("audio_config", "phi4_multimodal_audio")
    heard = conformer(audio, CONFORMER_NAMES, audio.integer("nemo_conv_channels"))
    rate = audio.integer("downsample_rate") * audio.integer("time_reduction")
    return _phi4_parts(config, processor, vision, token_rules.tile_side(processor), heard, rate)


def _phi4mm(config: Fields, processor: Fields) -> Parts:
    """Phi-4-multimodal as its authors publish it; its vision encoder is fixed in their code."""
    vision = Fields(class_defaults("phi4_multimodal_vision"), CONFIG)
    audio = config.part("audio_processor").part("config")
    channels = audio.part("nemo_conv_settings").integer("conv_channels")
    embedding = config.part("embd_layer")
    pixels = embedding.part("image_embd_layer").integer("crop_size")
    rate = embedding.part("audio_embd_layer").integer("downsample_rate") * audio.integer("time_reduction")
    return _phi4_parts(config, processor, vision, pixels, conformer(audio, PHI4MM_NAMES, channels), rate)


def _phi4_parts(
    config: Fields, processor: Fields, vision: Fields, pixels: int, heard: dict[str, Any], rate: int
) -> Parts:
    width = config.integer("hidden_size")
    # Speech has a projector of its own, and another one next to images.
    projector = [product(heard["hidden_size"], width), product(width, width)]
    encoders = {
        "vision": _two_layers(vision_encoder(vision, "phi4_multimodal_vision"), width, 0.25),
        "audio": with_projector(heard, *projector, *projector, norm=False),
    }
    tokens = token_rules.padded_grid(processor, pixels, vision.square("patch_size"))
    return Parts(encoders, config, "phi4_multimodal", tokens | token_rules.conformer_audio(rate))


def _qwen2_audio(config: Fields, _: Fields) -> Parts:
    heard = whisper(config.part("audio_config", "qwen2_audio_encoder"), OPENAI_NAMES)
    text = config.part("text_config")
    heard = with_projector(heard, product(heard["hidden_size"], text.integer("hidden_size"), 0.5))
    return Parts({"audio": heard}, text, str(text.needed("model_type")), token_rules.whisper_audio(2, heard_s=30.0))


def _voxtral(config: Fields, _: Fields) -> Parts:
    audio = config.part("audio_config", "voxtral_encoder")
    text = config.part("text_config")
    heard = whisper(audio, NEWER_NAMES)
    stacked = audio.integer("intermediate_size")
    rows = heard["hidden_size"] / stacked
    width = text.integer("hidden_size")
    heard = with_projector(heard, product(stacked, width, rows), product(width, width, rows))
    tokens = token_rules.whisper_audio(round(1 / rows), pads_llm=True)
    return Parts({"audio": heard}, text, str(text.needed("model_type")), tokens)


def _ultravox(config: Fields, _: Fields) -> Parts:
    audio = config.part("audio_config")
    text = config.part("text_config")
    if audio.get("model_type") != "whisper":
        raise unknown_choice(f"{audio.path}model_type", str(audio.get("model_type")), ["whisper"])
    heard = whisper(audio, OPENAI_NAMES)
    stack = config.integer("stack_factor")
    middle = config.integer("hidden_size")
    first = product(heard["hidden_size"] * stack, middle, 1 / stack)
    gated = config.get("projector_act") == "swiglu"
    second = product(middle // 2 if gated else middle, text.integer("hidden_size"), 1 / stack)
    # The processor rounds to whole encoder tokens, 50 a second, and the last stack is filled up.
    rules = {"frames_per_s": 50.0, "window_s": 0.01, "encoder_steps": [], "llm_steps": [[1, stack, 0]]}
    tokens = {"audio": rules, "audio_segment_s": 30.0, "audio_merge_frames": stack}
    return Parts({"audio": with_projector(heard, first, second)}, text, str(text.needed("model_type")), tokens)


# Builder, type of its vision transformer, whether that type overrides files, and the LLM's part.
VISION_FAMILIES: Mapping[str, tuple[Build, str, bool, str]] = {
    "gemma3": (_gemma3, "siglip_vision_model", False, "text_config"),
    "idefics2": (_idefics2, "idefics2_vision", True, "text_config"),
    "idefics3": (_idefics3, "idefics3_vision", True, "text_config"),
    "internvl": (_internvl, "internvl_vision", False, "text_config"),
    "internvl_chat": (_internvl_chat, "intern_vit_6b", False, "llm_config"),
    "llava": (_llava, CLIP, False, "text_config"),
    "llava_next": (_llava_grids, CLIP, False, "text_config"),
    "llava_onevision": (_llava_grids, CLIP, False, "text_config"),
    "mistral3": (_mistral3, "pixtral", False, "text_config"),
    "paligemma": (_paligemma, "siglip_vision_model", False, "text_config"),
    "smolvlm": (_idefics3, "idefics3_vision", True, "text_config"),
}
FAMILIES: Mapping[str, Callable[[Fields, Fields], Parts]] = {
    "phi4_multimodal": _phi4,
    "phi4mm": _phi4mm,
    "qwen2_audio": _qwen2_audio,
    "qwen2_vl": _qwen_vl,
    "qwen2_5_vl": _qwen_vl,
    "qwen3_vl": _qwen_vl,
    "qwen3_vl_moe": _qwen_vl,
    "qwen3_5": _qwen_vl,
    "qwen3_5_moe": _qwen_vl,
    "qwen3_omni_moe": _qwen_omni,
    "qwen3_omni_moe_thinker": _qwen_omni,
    "glm4v": _glm_vl,
    "glm4v_moe": _glm_vl,
    "ernie4_5_moe_vl": _ernie_vl,
    "ernie4_5_vl_moe": _ernie_vl,
    "kimi_k25": _kimi_vl,
    "kimi_vl": _kimi_vl,
    "ultravox": _ultravox,
    "voxtral": _voxtral,
}
