"""The layers of a module: blocks between an input embedding and a head, as a module's YAML states them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from entrain_bench.base.errors import require
from entrain_bench.specs.layer import BF16_BYTES, FP32_BYTES, Attention, Gemm, Layer
from entrain_bench.specs.parse import Count, OneOf, Rate, at_least
from entrain_bench.specs.unet import UNetConfig

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "squared_relu")
# How a checkpoint names a module's tensors (``entrain_bench/train/weights.py``).
CHECKPOINTS = ("llama", "qwen25vl_vision", "siglip", "whisper_encoder")


class Role(StrEnum):
    """Role of a module, in the order of a forward; encoders and generators work on items, the LLM on samples."""

    ENCODER = "encoder"
    LLM = "llm"
    GENERATOR = "generator"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary frequencies stretched for long contexts, as Llama 3.1 and 3.2 do it (Hugging Face's ``llama3``)."""

    factor: Rate
    low_freq_factor: Rate
    high_freq_factor: float
    original_context_tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleConfig:
    """Architecture of one module as its YAML states it; ``build_layers`` derives the layers.

    Encoders name ``modalities`` and the products of input embedding and projector (``embed_gemms``, ``head_gemms``);
    generators learn to generate sequences of ``item_tokens`` by blocks, or a U-Net (``UNetConfig``).
    Fields from ``rope_theta`` on decide numbers and no costs.
    """

    role: Annotated[str, OneOf([*Role])]
    source: str
    num_layers: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    ffn_hidden_size: int = 0
    gated_mlp: bool = False
    rotary: bool = True
    norm_bias: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    modalities: tuple[str, ...] = ()
    window_tokens: Annotated[int, at_least(0)] = 0  # 0: full attention
    full_attention_layers: tuple[int, ...] = ()
    embed_gemms: tuple[Gemm, ...] = ()
    head_gemms: tuple[Gemm, ...] = ()
    head_norm: bool = True
    vocab_size: int = 0
    tied_embeddings: bool = False
    context_tokens: int = 0
    item_tokens: int = 0
    unet: UNetConfig | None = None
    rope_theta: Rate = 10_000.0  # arXiv:2104.09864, section 3.2.2
    rope_scaling: RopeScaling | None = None
    mrope_sections: tuple[int, ...] = ()  # frequencies of time, height, width (arXiv:2409.12191, section 2.1)
    mrope_frame_step: Annotated[float, at_least(0)] = 0.0  # time difference between one video item and the next
    norm_epsilon: Rate = 1e-5  # torch.nn.LayerNorm's
    activation: Annotated[str, OneOf(("", *ACTIVATIONS))] = ""  # default: SiLU in gated blocks, otherwise GELU
    learned_positions: Annotated[int, at_least(0)] = 0  # tokens of an item, at most; 0: rotary or fixed sinusoids
    checkpoint: Annotated[str, OneOf(("", *CHECKPOINTS))] = ""  # how published weights name the module's tensors


# How the loss is computed: by Megatron-LM's operators on the vocabulary's shards (its default), by one kernel of
# Transformer Engine, or by PyTorch's operators on logits that tensor-parallel ranks gather.
UNFUSED, FUSED, EAGER = CROSS_ENTROPIES = ("unfused", "fused", "eager")


def build_layers(config: ModuleConfig) -> tuple[Layer, ...]:
    """The layers of a module: ``embed``, ``num_layers`` blocks (``block`` or ``window_block``), ``head``."""
    is_llm = config.role == Role.LLM
    embed = token_embedding(config) if is_llm else _encoder_embedding(config)
    head = language_head(config) if is_llm else _projector(config)
    full = _block(config, "block", window_tokens=0)
    window = _block(config, "window_block", config.window_tokens) if config.window_tokens else full
    blocks = (full if i in config.full_attention_layers else window for i in range(config.num_layers))
    return (embed, *blocks, head)


def mlp_of_block(config: ModuleConfig) -> Layer:
    """Return a block's MLP with its norm, as recomputation repeats it: up to the tensors that backward needs."""
    h = config.hidden_size
    f = config.ffn_hidden_size
    up = 2 * f if config.gated_mlp else f
    return Layer(
        kind="mlp",
        gemms=(Gemm(h, up), Gemm(f, h, row_parallel=True)),
        elementwise_bytes_per_token=BF16_BYTES * (2 * h + up + f),
        num_elementwise_kernels=2,
        num_gathers=1,
        hidden_size=h,
        # The norm's input is the block's input.
        activation_bytes_per_token=BF16_BYTES * (h + up + f),
        input_bytes_per_token=BF16_BYTES * h,
        replicated_elementwise_bytes_per_token=BF16_BYTES * 2 * h,
        replicated_bytes_per_token=BF16_BYTES * h,
    )


def _block(config: ModuleConfig, kind: str, window_tokens: int) -> Layer:
    h = config.hidden_size
    f = config.ffn_hidden_size
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    up = 2 * f if config.gated_mlp else f
    biases = (q + 2 * kv if config.qkv_bias else 0) + (2 * h + up if config.linear_bias else 0)
    norms = 2 * h * (2 if config.norm_bias else 1)
    # Two norms and two residual additions over the hidden state, rotary on queries and keys, the MLP's activation.
    hidden = 2 * (2 + 3) * h
    elementwise = hidden + (2 * (q + kv) if config.rotary else 0) + up + f
    # Kept for backward: both norms' inputs and outputs, queries, keys, values, attention output, MLP before and after
    # its activation; in fp32 flash attention's logarithm of each head's sum.
    kept = BF16_BYTES * (4 * h + 2 * q + 2 * kv + up + f)
    fp32 = FP32_BYTES * config.num_heads
    return Layer(
        kind=kind,
        gemms=(Gemm(h, q + 2 * kv), Gemm(q, h, row_parallel=True), Gemm(h, up), Gemm(f, h, row_parallel=True)),
        attention=Attention(q, kv, config.role == Role.LLM, window_tokens, head_dim=config.head_dim),
        elementwise_bytes_per_token=BF16_BYTES * elementwise,
        num_elementwise_kernels=5 + (2 if config.rotary else 0),
        num_gathers=2,
        num_scatters=2,
        hidden_size=h,
        parameters=h * (q + 2 * kv) + q * h + h * up + f * h + norms + biases,
        activation_bytes_per_token=kept + fp32,
        input_bytes_per_token=BF16_BYTES * h,
        replicated_elementwise_bytes_per_token=BF16_BYTES * hidden,
        replicated_bytes_per_token=BF16_BYTES * 4 * h,
        fp32_bytes_per_token=fp32,
        # Gradients on both sides of the MLP's activation, which all else is still there for.
        transient_bytes_per_token=BF16_BYTES * (up + f),
    )


def token_embedding(config: ModuleConfig) -> Layer:
    """Return the LLM's first layer: a row of the embedding per token."""
    h = config.hidden_size
    return Layer(
        kind="embed",
        elementwise_bytes_per_token=2 * BF16_BYTES * h,
        num_elementwise_kernels=1,
        num_scatters=1,
        hidden_size=h,
        parameters=config.vocab_size * h,
        replicated_elementwise_bytes_per_token=2 * BF16_BYTES * h,
        recomputed=False,
    )


def language_head(config: ModuleConfig, cross_entropy: str = UNFUSED) -> Layer:
    """Return the LLM's last layer: final norm, logits and their loss, as one of ``CROSS_ENTROPIES`` computes it.

    Sources of the bytes per logit: megatron-core 0.19 (``tensor_parallel/cross_entropy.py``: fp32 softmax in place).
        Transformer Engine (``common/triton/cross_entropy.py``): two reads, the gradient replaces the logits. PyTorch:
        gathered logits, their fp32 copy and the fp32 logarithms, kept.
    """
    h = config.hidden_size
    vocab = config.vocab_size
    norm = h * (2 if config.norm_bias else 1)
    hidden = 2 * BF16_BYTES * h
    # Bytes of a logit: forward and backward traffic, kept in bf16 and in fp32, only while a pass runs.
    moved, returned, kept, fp32, cast = {
        UNFUSED: (38, 14, 0, FP32_BYTES, BF16_BYTES),
        FUSED: (6, 4, BF16_BYTES, 0, 0),
        EAGER: (18, 22, BF16_BYTES, 2 * FP32_BYTES, 2 * FP32_BYTES),
    }[cross_entropy]
    gathered = cross_entropy == EAGER
    return Layer(
        kind="head",
        gemms=(Gemm(h, vocab),),
        elementwise_bytes_per_token=hidden + moved * vocab,
        num_elementwise_kernels={UNFUSED: 7, FUSED: 3, EAGER: 4}[cross_entropy],
        backward_elementwise_bytes_per_token=2 * hidden + returned * vocab,
        num_gathers=1,
        gathered_width=vocab * gathered,
        hidden_size=h,
        parameters=h * vocab + norm,
        activation_bytes_per_token=hidden + (kept + fp32) * vocab,
        input_bytes_per_token=BF16_BYTES * h,
        replicated_elementwise_bytes_per_token=hidden,
        replicated_bytes_per_token=hidden,
        whole_bytes_per_token=kept * vocab * gathered,
        fp32_bytes_per_token=fp32 * vocab,
        cast_bytes_per_token=cast * vocab,
        recomputed=False,
    )


def _encoder_embedding(config: ModuleConfig) -> Layer:
    gemms = alternate_splits(config.embed_gemms)
    convolutions = config.norm_bias  # LayerNorm encoders embed by convolutions with a bias, GELU after each
    inputs = [BF16_BYTES * gemm.k * gemm.rows_per_token for gemm in gemms]
    outputs = [BF16_BYTES * gemm.n * gemm.rows_per_token for gemm in gemms]
    return Layer(
        kind="embed",
        gemms=gemms,
        elementwise_bytes_per_token=sum(inputs) + sum(outputs),
        num_elementwise_kernels=len(gemms),
        num_scatters=1,
        hidden_size=config.hidden_size,
        parameters=sum(gemm.k * gemm.n + (gemm.n if convolutions else 0) for gemm in gemms),
        # Inputs of products, the features on every rank, and GELU's input.
        activation_bytes_per_token=sum(inputs) + (sum(outputs) if convolutions else 0),
        input_bytes_per_token=inputs[0],
        whole_bytes_per_token=inputs[0] + (outputs[-1] if convolutions else 0),
        recomputed=False,
    )


def _projector(config: ModuleConfig) -> Layer:
    h = config.hidden_size
    gemms = alternate_splits(config.head_gemms)
    norm = (h * (2 if config.norm_bias else 1)) if config.head_norm else 0
    middle = sum(gemm.n * gemm.rows_per_token for gemm in gemms[:-1])
    # Kept: the norm's input, each rank's own; products' inputs (all hidden states, GELU's output); GELU's input.
    inputs = BF16_BYTES * gemms[0].k * gemms[0].rows_per_token
    normed = BF16_BYTES * h if config.head_norm else 0
    return Layer(
        kind="head",
        gemms=gemms,
        elementwise_bytes_per_token=BF16_BYTES * (2 * h + 2 * middle),
        num_elementwise_kernels=1 + len(gemms),
        num_gathers=1,
        num_scatters=1,
        hidden_size=h,
        parameters=norm + sum(gemm.k * gemm.n + gemm.n for gemm in gemms),
        activation_bytes_per_token=normed + inputs + 2 * BF16_BYTES * middle,
        input_bytes_per_token=BF16_BYTES * h,
        replicated_elementwise_bytes_per_token=2 * BF16_BYTES * h,
        replicated_bytes_per_token=normed,
        whole_bytes_per_token=inputs,
        recomputed=False,
    )


def alternate_splits(gemms: Sequence[Gemm]) -> tuple[Gemm, ...]:
    """Consecutive products, column and row parallel in turn."""
    return tuple(replace(gemm, row_parallel=gemm.row_parallel or index % 2 == 1) for index, gemm in enumerate(gemms))


def find_activation(config: ModuleConfig) -> str:
    """The activation of a module's blocks: SiLU in gated ones, otherwise GELU, if the YAML states none."""
    return config.activation or ("silu" if config.gated_mlp else "gelu")


def check_numerics(config: ModuleConfig, where: str) -> None:
    """Raise ``UserError`` for values that no architecture has."""
    if scaling := config.rope_scaling:
        high = scaling.high_freq_factor
        allowed = f"above low_freq_factor={scaling.low_freq_factor}"
        require(high > scaling.low_freq_factor, f"{where}.rope_scaling.high_freq_factor", high, allowed)
    sections = [*config.mrope_sections]
    fits = len(sections) == 3 and min(sections) >= 0 and 2 * sum(sections) == config.head_dim
    allowed = f"three counts of frequencies that sum to head_dim / 2={config.head_dim // 2}"
    require(not sections or fits, f"{where}.mrope_sections", sections, allowed)
