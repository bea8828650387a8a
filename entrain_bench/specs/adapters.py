"""Low-rank adapters (LoRA, arXiv:2106.09685): two trained products of rank r on each adapted, frozen product."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.specs.layer import BF16_BYTES, Gemm, Layer
from entrain_bench.specs.module_layers import ModuleConfig
from entrain_bench.specs.parse import between, check_fields

# Every product with weights except the router's, as separate products of transformers.
EVERY = "all-linear"
# Values of an output that scaling and addition move: both read and written, and the product's own output read.
MOVED = 5
ADAPTER_KERNELS = 2


@dataclass(frozen=True, slots=True)
class Adapter:
    """Rank, and adapted products as ``NAME`` of the LLM or ``MODULE.NAME``; rank 0: there are none."""

    rank: Annotated[int, between(0, 4096)] = 0
    targets: tuple[str, ...] = (EVERY,)

    def __post_init__(self) -> None:
        check_fields(self, "adapter.")
        require(bool(self.targets), "adapter.targets", [], f"names of products, such as {EVERY}")

    def names_in(self, module: str, llm: str) -> frozenset[str]:
        """Return the names of adapted products of a module; ``llm``: the LLM's name."""
        if not self.rank:
            return frozenset()
        split = [(place or llm, name) for place, _, name in (text.rpartition(".") for text in self.targets)]
        return frozenset(name for place, name in split if place == module)


def adapted_layer(layer: Layer, config: ModuleConfig, rank: int, names: Collection[str]) -> Layer:
    """Return a frozen layer that hands gradients on, with adapters on its products of these names."""
    part = layer.remade
    if part is not None:
        part = _with_products(part, [gemm for name, gemm in _of_mlp(config, part) if _is_named(name, names)], rank)
    products = [gemm for name, gemm in named_products(config, layer) if _is_named(name, names)]
    return replace(_with_products(layer, products, rank), remade=part)


def check_targets(names: Collection[str], module: str, known: Collection[str]) -> None:
    """Raise ``UserError`` for a name that no product of a module has."""
    for name in names:
        if name not in known and name != EVERY:
            raise unknown_choice("adapter.targets", f"{module}.{name}", [EVERY, *sorted(known)])


def check_modules(adapter: Adapter, modules: Collection[str]) -> None:
    """Raise ``UserError`` for a module that the model does not have."""
    for text in adapter.targets if adapter.rank else ():
        place = text.rpartition(".")[0]
        if place and place not in modules:
            raise UserError(f"adapter.targets={text}: must begin with a module of the model: {', '.join(modules)}")


def named_products(config: ModuleConfig, layer: Layer) -> Iterator[tuple[str, Gemm]]:
    """Products of a block by the names that transformers gives them, then by Megatron-LM's; none of embedding or head.

    Those of experts are each expert's own.
    """
    if not layer.gemms or not layer.num_gathers or not layer.num_scatters or layer.kind == "head":
        return
    h = config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if layer.attention is None:
        linear = config.linear_attention
        assert linear is not None
        values = linear.num_value_heads * linear.value_head_dim
        yield "in_proj_qkvz", Gemm(h, 2 * linear.num_key_heads * linear.key_head_dim + 2 * values)
        yield "in_proj_ba", Gemm(h, 2 * linear.num_value_heads)
        yield "out_proj", Gemm(values, h, row_parallel=True)
    elif (latent := config.latent) is not None:
        own, shared, value = latent.nope_head_dim, latent.rope_head_dim, latent.value_head_dim
        if latent.query_rank:
            yield "q_a_proj", Gemm(h, latent.query_rank)
            yield "q_b_proj", Gemm(latent.query_rank, config.num_heads * (own + shared))
        else:
            yield "q_proj", Gemm(h, config.num_heads * (own + shared))
        yield "kv_a_proj_with_mqa", Gemm(h, latent.key_value_rank + shared)
        yield "kv_b_proj", Gemm(latent.key_value_rank, config.num_heads * (own + value))
        yield "o_proj", Gemm(config.num_heads * value, h, row_parallel=True)
    else:
        gate = q if config.gated_attention else 0
        yield from (("q_proj", Gemm(h, q + gate)), ("k_proj", Gemm(h, kv)), ("v_proj", Gemm(h, kv)))
        yield "o_proj", Gemm(q, h, row_parallel=True)
        yield from (("linear_qkv", Gemm(h, q + gate + 2 * kv)), ("linear_proj", Gemm(q, h, row_parallel=True)))
    yield from _of_mlp(config, layer)


def _of_mlp(config: ModuleConfig, layer: Layer) -> Iterator[tuple[str, Gemm]]:
    h = config.hidden_size
    widths = [(config.ffn_hidden_size, 1.0, 1)]
    if layer.num_experts:
        routed = config.experts
        assert routed is not None
        share = routed.visual_share if routed.visual_count else 0.0
        kinds = (
            (routed.count, routed.ffn_hidden_size, 1.0 - share),
            (
                routed.visual_count,
                routed.visual_ffn_hidden_size,
                share,
            ),
        )
        widths = [(f, routed.top_k * part, count) for count, f, part in kinds if count]
        widths += [(routed.shared_ffn_hidden_size, 1.0, 1)] if routed.shared_ffn_hidden_size else []
    for f, rows, groups in widths:
        if config.gated_mlp:
            yield "gate_proj", Gemm(h, f, rows_per_token=rows, groups=groups)
        yield "up_proj", Gemm(h, f, rows_per_token=rows, groups=groups)
        yield "down_proj", Gemm(f, h, True, rows, groups=groups)
        yield "linear_fc1", Gemm(h, 2 * f if config.gated_mlp else f, rows_per_token=rows, groups=groups)
        yield "linear_fc2", Gemm(f, h, True, rows, groups=groups)


def _is_named(name: str, names: Collection[str]) -> bool:
    return name in names or (EVERY in names and not name.startswith("linear_"))


def _with_products(layer: Layer, adapted: list[Gemm], rank: int) -> Layer:
    if not adapted:
        return layer
    added = [
        pair
        for gemm in adapted
        for pair in (
            replace(gemm, n=rank, adapter=True),
            replace(gemm, k=rank, row_parallel=False, adapter=True),
        )
    ]
    sizes = [gemm.groups * gemm.k * gemm.n for gemm in added]
    of_experts = sum(size for gemm, size in zip(added, sizes, strict=True) if gemm.groups > 1)
    idle = sum(size * (1.0 - gemm.rows_per_token / gemm.groups) for gemm, size in zip(added, sizes, strict=True))
    inner = BF16_BYTES * sum(gemm.rows_per_token * rank for gemm in adapted)
    moved = BF16_BYTES * MOVED * sum(gemm.rows_per_token * gemm.n for gemm in adapted)
    base, mine = (sum(gemm.k * gemm.n * gemm.rows_per_token for gemm in gemms) for gemms in (layer.gemms, added))
    return replace(
        layer,
        gemms=(*layer.gemms, *added),
        parameters=layer.parameters + sum(sizes),
        adapter_parameters=sum(sizes),
        expert_parameters=layer.expert_parameters + of_experts,
        expert_adapter_parameters=of_experts,
        idle_parameters=layer.idle_parameters + idle,
        elementwise_bytes_per_token=layer.elementwise_bytes_per_token + moved,
        num_elementwise_kernels=layer.num_elementwise_kernels + ADAPTER_KERNELS * len(adapted),
        activation_bytes_per_token=layer.activation_bytes_per_token + inner,
        backward_share=(layer.backward_share * base + mine) / (base + mine),
    )
