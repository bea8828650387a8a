"""The layers of a module: blocks between an input embedding and a head, as a module's YAML states them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from entrain_bench.base.errors import require
from entrain_bench.specs.layer import BF16_BYTES, FP32_BYTES, Attention, Gemm, Layer
from entrain_bench.specs.parse import Count, OneOf, Rate, at_least, between
from entrain_bench.specs.unet import UNetConfig

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "squared_relu")
# Published architectures, with which tests compare stages.
CHECKPOINTS = ("llama", "qwen3_moe", "qwen25vl_vision", "siglip", "whisper_encoder")


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
class Experts:
    """Experts in place of MLPs; a router sends each token to the best ``top_k`` of them, and drops none."""

    count: Count  # routed experts of a layer
    top_k: Count
    ffn_hidden_size: Count  # of each
    shared_ffn_hidden_size: Annotated[int, at_least(0)] = 0  # of all experts together that every token meets
    shared_gate: bool = False  # whether these have a gate of their own
    bias: bool = False  # of the experts' products
    # Experts for tokens of images alone, ``top_k`` of them a token; the others are then for text. ``visual_share`` of
    # the tokens are of images.
    visual_count: Annotated[int, at_least(0)] = 0
    visual_ffn_hidden_size: Annotated[int, at_least(0)] = 0
    visual_share: Annotated[float, between(0, 1, "in [0, 1]")] = 0.5
    load_std: Annotated[float, between(0, 10)] = 0.0  # of an expert's tokens relative to their mean; 0: balanced
    dense_layers: tuple[int, ...] = ()  # with an MLP of the module's ``ffn_hidden_size``


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    query_rank: Annotated[int, at_least(0)]  # width of compressed queries; 0: not compressed
    key_value_rank: Count
    nope_head_dim: Count  # of a query or key, without a position
    rope_head_dim: Count  # likewise with one, which all heads share in keys
    value_head_dim: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Gated DeltaNet (arXiv:2412.06464) in some layers."""

    layers: tuple[int, ...]
    num_key_heads: Count
    num_value_heads: Count
    key_head_dim: Count
    value_head_dim: Count
    kernel_tokens: Count  # of the convolution before it


DELTA_CHUNK = 64  # tokens that kernels of Gated DeltaNet work on together (flash-linear-attention)


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
    experts: Experts | None = None
    latent: LatentAttention | None = None
    linear_attention: LinearAttention | None = None
    gated_attention: bool = False  # the output has a gate as wide as the queries
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
    qk_norm: bool = False  # whether each head of queries and keys has a norm
    mrope_sections: tuple[int, ...] = ()  # frequencies of time, height, width (arXiv:2409.12191, section 2.1)
    mrope_frame_step: Annotated[float, at_least(0)] = 0.0  # time difference between one video item and the next
    norm_epsilon: Rate = 1e-5  # torch.nn.LayerNorm's
    activation: Annotated[str, OneOf(("", *ACTIVATIONS))] = ""  # default: SiLU in gated blocks, otherwise GELU
    learned_positions: Annotated[int, at_least(0)] = 0  # tokens of an item, at most; 0: rotary or fixed sinusoids
    checkpoint: Annotated[str, OneOf(("", *CHECKPOINTS))] = ""  # the published architecture


# How the loss is computed: by Megatron-LM's operators on the vocabulary's shards (its default), by one kernel of
# Transformer Engine, or by PyTorch's operators on logits that tensor-parallel ranks gather.
UNFUSED, FUSED, EAGER = CROSS_ENTROPIES = ("unfused", "fused", "eager")


def build_layers(config: ModuleConfig) -> tuple[Layer, ...]:
    """The layers of a module: ``embed``, ``num_layers`` blocks, ``head``.

    A block is called ``block``, after ``window_`` or ``linear_`` attention and ``expert_`` where it has experts.
    """
    is_llm = config.role == Role.LLM
    embed = token_embedding(config) if is_llm else _encoder_embedding(config)
    head = language_head(config) if is_llm else _projector(config)
    linear = config.linear_attention.layers if config.linear_attention else ()
    dense = range(config.num_layers) if config.experts is None else config.experts.dense_layers
    known: dict[str, Layer] = {}

    def block(index: int) -> Layer:
        in_window = bool(config.window_tokens) and index not in config.full_attention_layers
        is_linear = index in linear
        has_experts = index not in dense
        attends = "linear_" if is_linear else "window_" if in_window else ""
        kind = f"{attends}{'expert_' if has_experts else ''}block"
        if kind not in known:
            known[kind] = _block(config, kind, config.window_tokens * in_window, is_linear, has_experts)
        return known[kind]

    blocks = map(block, range(config.num_layers))
    return (embed, *blocks, head)


@dataclass(frozen=True, slots=True)
class _Part:
    """The attention or the MLP of a block; sizes are values of a token, in bf16 unless the name says bytes."""

    gemms: tuple[Gemm, ...]
    parameters: int
    moved: float  # elementwise, without hidden states
    kept: float  # for the backward, without hidden states
    num_kernels: int = 0
    fp32_bytes: int = 0  # kept
    transient: float = 0
    whole_moved: int = 0  # by every rank of a tensor-parallel group
    whole_kept: int = 0  # likewise
    expert_parameters: int = 0
    active_parameters: float = 0.0  # of the experts, that a token meets


def has_dense_layers(config: ModuleConfig) -> bool:
    """Whether any block of a module has an MLP in place of experts."""
    return config.experts is None or bool(config.experts.dense_layers)


def mlp_of_block(config: ModuleConfig, block: Layer) -> Layer:
    """Return a block's MLP with its norm, as recomputation repeats it: up to the tensors that backward needs."""
    h = config.hidden_size
    mlp = _mlp(config, block.num_experts > 0)
    whole = BF16_BYTES * mlp.whole_kept
    return Layer(
        kind="mlp",
        gemms=mlp.gemms,
        elementwise_bytes_per_token=BF16_BYTES * (2 * h + mlp.moved),
        num_elementwise_kernels=2 + mlp.num_kernels,
        num_gathers=1,
        hidden_size=h,
        # The norm's input is the block's input.
        activation_bytes_per_token=BF16_BYTES * (h + mlp.kept) + whole + mlp.fp32_bytes,
        input_bytes_per_token=BF16_BYTES * h,
        replicated_elementwise_bytes_per_token=BF16_BYTES * 2 * h,
        replicated_bytes_per_token=BF16_BYTES * h,
        whole_bytes_per_token=whole,
        whole_elementwise_bytes_per_token=BF16_BYTES * mlp.whole_moved,
        fp32_bytes_per_token=mlp.fp32_bytes,
        expert_copies=block.expert_copies,
        num_experts=block.num_experts,
        expert_load_std=block.expert_load_std,
    )


def _block(config: ModuleConfig, kind: str, window_tokens: int, linear: bool, experts: bool) -> Layer:
    h = config.hidden_size
    attention: Attention | None = None
    if linear:
        part = _linear_attention(config)
    elif config.latent is not None:
        part, attention = _latent_attention(config, config.latent, window_tokens)
    else:
        part, attention = _attention(config, window_tokens)
    mlp = _mlp(config, experts)
    norms = 2 * h * (2 if config.norm_bias else 1)
    # Two norms and two residual additions over the hidden state; without bytes that attention and MLP move.
    hidden = 2 * (2 + 3) * h
    # Kept for backward: inputs and outputs of both norms, and tensors of the parts, some of them whole on every rank.
    whole = BF16_BYTES * (part.whole_kept + mlp.whole_kept)
    fp32 = part.fp32_bytes + mlp.fp32_bytes
    routed = config.experts if experts else None
    return Layer(
        kind=kind,
        gemms=(*part.gemms, *mlp.gemms),
        attention=attention,
        elementwise_bytes_per_token=BF16_BYTES * (hidden + part.moved + mlp.moved),
        num_elementwise_kernels=5 + part.num_kernels + mlp.num_kernels,
        num_gathers=2,
        num_scatters=2,
        hidden_size=h,
        parameters=part.parameters + mlp.parameters + norms,
        expert_parameters=mlp.expert_parameters,
        idle_parameters=mlp.expert_parameters - mlp.active_parameters,
        expert_copies=routed.top_k if routed else 0,
        num_experts=routed.count if routed else 0,
        expert_load_std=routed.load_std if routed else 0.0,
        activation_bytes_per_token=BF16_BYTES * (4 * h + part.kept + mlp.kept) + whole + fp32,
        input_bytes_per_token=BF16_BYTES * h,
        replicated_elementwise_bytes_per_token=BF16_BYTES * hidden,
        replicated_bytes_per_token=BF16_BYTES * 4 * h,
        whole_bytes_per_token=whole,
        whole_elementwise_bytes_per_token=BF16_BYTES * (part.whole_moved + mlp.whole_moved),
        fp32_bytes_per_token=fp32,
        transient_bytes_per_token=BF16_BYTES * mlp.transient,
    )


def _attention(config: ModuleConfig, window_tokens: int) -> tuple[_Part, Attention]:
    h = config.hidden_size
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    gate = q if config.gated_attention else 0
    biases = (q + 2 * kv if config.qkv_bias else 0) + (h if config.linear_bias else 0)
    part = _Part(
        gemms=(Gemm(h, q + gate + 2 * kv), Gemm(q, h, row_parallel=True)),
        parameters=h * (q + gate + 2 * kv) + q * h + biases,
        # Rotary on queries and keys; a gate on the output.
        moved=(2 * (q + kv) if config.rotary else 0) + 3 * gate,
        # Queries, keys, values, the output; in fp32 flash attention's logarithm of each head's sum.
        kept=2 * q + 2 * kv + gate,
        num_kernels=(2 if config.rotary else 0) + bool(gate),
        fp32_bytes=FP32_BYTES * config.num_heads,
    )
    return part, Attention(q, kv, config.role == Role.LLM, window_tokens, head_dim=config.head_dim)


def _latent_attention(config: ModuleConfig, latent: LatentAttention, window_tokens: int) -> tuple[_Part, Attention]:
    """Multi-head latent attention (arXiv:2405.04434, section 2.1) as it trains: keys and values are made in full."""
    h = config.hidden_size
    heads = config.num_heads
    own, shared, value = latent.nope_head_dim, latent.rope_head_dim, latent.value_head_dim
    queries = heads * (own + shared)
    down, up = (latent.query_rank,) * 2 if latent.query_rank else (0, h)
    gemms = (
        *((Gemm(h, down),) if down else ()),
        Gemm(up, queries),
        Gemm(h, latent.key_value_rank + shared),
        Gemm(latent.key_value_rank, heads * (own + value)),
        Gemm(heads * value, h, row_parallel=True),
    )
    part = _Part(
        gemms=gemms,
        parameters=sum(gemm.k * gemm.n for gemm in gemms) + down + latent.key_value_rank,
        # Norms of both compressed vectors, rotary on shared parts, keys put together.
        moved=2 * (down + latent.key_value_rank) + 2 * queries + 2 * heads * (own + shared),
        kept=2 * (down + latent.key_value_rank) + shared + 2 * queries + 2 * heads * value,
        num_kernels=5,
        fp32_bytes=FP32_BYTES * heads,
    )
    # Scores are as wide as queries, sums as values: the mean of both counts for each.
    width = heads * (own + shared + value) // 2
    causal = config.role == Role.LLM
    return part, Attention(width, width, causal, window_tokens, head_dim=(own + shared + value) // 2)


def _linear_attention(config: ModuleConfig) -> _Part:
    """Gated DeltaNet in chunks (arXiv:2412.06464, section 3.3): products inside chunks and with the state of each head.

    A token of a head has three products with the state, and with the chunk's tokens three as wide as a key and two as
    wide as a value. One product without parameters represents them.
    """
    linear = config.linear_attention
    assert linear is not None
    h = config.hidden_size
    keys = linear.num_key_heads * linear.key_head_dim
    values = linear.num_value_heads * linear.value_head_dim
    mixed = 2 * keys + values
    k, v = linear.key_head_dim, linear.value_head_dim
    gates = 2 * linear.num_value_heads
    state = 3 * v + DELTA_CHUNK * (3 + -(-2 * v // k))
    gemms = (Gemm(h, mixed + values + gates), Gemm(values, h, row_parallel=True))
    return _Part(
        gemms=(gemms[0], Gemm(k, state * linear.num_value_heads), gemms[1]),
        parameters=sum(gemm.k * gemm.n for gemm in gemms) + mixed * linear.kernel_tokens + gates + v,
        # A convolution, norms of queries and keys, a gated norm of the output; states in fp32, once a chunk.
        moved=2 * mixed + 4 * keys + 4 * values + 4 * k * v * linear.num_value_heads // DELTA_CHUNK,
        kept=2 * mixed + 3 * values + 2 * k * v * linear.num_value_heads // DELTA_CHUNK,
        num_kernels=12,
    )


def _mlp(config: ModuleConfig, experts: bool) -> _Part:
    h = config.hidden_size
    if not experts:
        return _dense_mlp(h, config.ffn_hidden_size, config)
    routed = config.experts
    assert routed is not None
    copies = routed.top_k
    kinds = [(routed.count, routed.ffn_hidden_size, float(copies))]
    if routed.visual_count:
        share = routed.visual_share
        kinds = [(routed.count, routed.ffn_hidden_size, copies * (1.0 - share))]
        kinds.append((routed.visual_count, routed.visual_ffn_hidden_size, copies * share))
    grouped = list[Gemm]()
    parameters = 0
    active = width = 0.0
    for count, f, rows in kinds:
        up = 2 * f if config.gated_mlp else f
        each = h * up + f * h + ((up + h) if routed.bias else 0)
        grouped += Gemm(h, up, rows_per_token=rows, groups=count), Gemm(f, h, True, rows, groups=count)
        parameters += count * each
        active += rows * each
        width += rows * (up + f)
    scores = sum(count for count, *_ in kinds)
    shared = _dense_mlp(h, routed.shared_ffn_hidden_size, config) if routed.shared_ffn_hidden_size else None
    router = h * scores + (h if routed.shared_gate else 0)
    return _Part(
        gemms=(Gemm(h, scores), *grouped, *(shared.gemms if shared else ())),
        parameters=router + parameters + (shared.parameters if shared else 0),
        expert_parameters=parameters,
        active_parameters=active,
        moved=width + (shared.moved if shared else 0),
        kept=width + (shared.kept if shared else 0),
        # Scores and their choice, the order of tokens by expert and back, an activation of the shared experts.
        num_kernels=7 + (2 if shared else 0),
        # Scores and probabilities of all experts.
        fp32_bytes=2 * FP32_BYTES * scores,
        transient=width + copies * h,
        # Copies of a token are read and written in the order of experts, and read back and added up.
        whole_moved=(3 * copies + 1) * h + 4 * FP32_BYTES // BF16_BYTES * scores,
        whole_kept=copies * h,
    )


def _dense_mlp(h: int, f: int, config: ModuleConfig) -> _Part:
    up = 2 * f if config.gated_mlp else f
    return _Part(
        gemms=(Gemm(h, up), Gemm(f, h, row_parallel=True)),
        parameters=h * up + f * h + (h + up if config.linear_bias else 0),
        # Before and after the activation; gradients on both sides of it, which all else is still there for.
        moved=up + f,
        kept=up + f,
        transient=up + f,
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
