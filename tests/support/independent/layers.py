"""Layers of a module as its YAML states it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from entrain_bench.program import Pass

BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Product:
    """``[tokens * rows, k] @ [k, n]``; with several weights each takes its part of the rows."""

    k: float
    n: float
    rows: float = 1.0
    splits_k: bool = False
    weights: int = 1


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        attention: widths of queries and of keys, whether it is causal, its window (0: none), the width of a head.
        elementwise_bytes: a token's, those of hidden states among them.
        hidden_bytes: the latter.
        returned_bytes: a token's in backward, twice those of hidden states among them; None: twice the forward's.
        gathered: bytes of a token's outputs that tensor-parallel ranks gather; then each moves all but hidden states.
        gathers, scatters: inputs of column-parallel products, sums of row-parallel ones.
        whole_bytes: more elementwise bytes, which every tensor-parallel rank moves.
        experts: how many there are, how many a token is sent to, and their parameters; None: no experts.
        learns: whether its weights do.
        gradients: how many gradients its backward makes: of input and weights, of the input alone, none.
    """

    kind: str
    hidden: int
    parameters: float
    products: list[Product] = field(default_factory=list)
    attention: tuple[int, int, bool, int, int] | None = None
    elementwise_bytes: float = 0.0
    hidden_bytes: float = 0.0
    launches: int = 0
    gathers: int = 0
    scatters: int = 0
    learns: bool = True
    gradients: int = 2
    returned_bytes: float | None = None
    gathered: float = 0.0
    whole_bytes: float = 0.0
    experts: tuple[int, int, float] | None = None

    @property
    def is_block(self) -> bool:
        """Whether it is neither embedding nor head."""
        return self.kind in ("block", "window", "experts")


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of each pass, communication inside it apart; a weight pass has none, a whole backward no weight pass."""

    forward: float
    forward_comm: float
    backward: float
    backward_comm: float
    weight: float

    def of(self, kind: Pass) -> tuple[float, float]:
        """Of one pass: computation, communication."""
        if kind is Pass.WEIGHT:
            return self.weight, 0.0
        ahead, back = (self.forward, self.forward_comm), (self.backward, self.backward_comm)
        return back if kind is Pass.BACKWARD else ahead


def layers_of(config: Mapping[str, Any], loss: str = "unfused") -> list[Layer]:
    """The layers of a module: embedding, blocks, head (docs/costs.md; no U-Nets)."""
    assert "unet" not in config
    get = {"rotary": True, "norm_bias": False, "qkv_bias": False, "linear_bias": False, "head_norm": True, **config}
    hidden, norm = get["hidden_size"], 2 if get["norm_bias"] else 1
    causal = get["role"] == "llm"
    if causal:
        words = get["vocab_size"]
        moved = 2 * BF16 * hidden
        first = Layer(
            "embed", hidden, words * hidden, elementwise_bytes=moved, hidden_bytes=moved, launches=1, scatters=1
        )
        # The final norm; then the loss. Every list counts how often an operator reads or writes all logits.
        cast = BF16 + FP32
        ahead = {"unfused": cast + (1 + 2 + 2 + 1 + 2) * FP32, "eager": cast + (2 + 1) * FP32, "fused": 3 * BF16}[loss]
        back = {"unfused": 2 * FP32 + cast, "eager": (1 + 3) * FP32 + cast, "fused": 2 * BF16}[loss]
        last = Layer(
            "head",
            hidden,
            hidden * words + hidden * norm,
            [Product(hidden, words)],
            elementwise_bytes=moved + words * ahead,
            hidden_bytes=moved,
            returned_bytes=2 * moved + words * back,
            gathered=BF16 * words * (loss == "eager"),
            launches={"unfused": 7, "fused": 3, "eager": 4}[loss],
            gathers=1,
        )
    else:
        embed, head = (_products(get[name]) for name in ("embed_gemms", "head_gemms"))
        held = sum(each.k * each.n + (each.n if get["norm_bias"] else 0) for each in embed)
        traffic = BF16 * sum((each.k + each.n) * each.rows for each in embed)
        first = Layer("embed", hidden, held, embed, None, traffic, 0.0, len(embed), scatters=1)
        held = sum(each.k * each.n + each.n for each in head) + (hidden * norm if get["head_norm"] else 0)
        traffic = 2 * BF16 * (hidden + sum(each.n * each.rows for each in head[:-1]))
        last = Layer("head", hidden, held, head, None, traffic, 2 * BF16 * hidden, 1 + len(head), 1, 1)
    window, full = get.get("window_tokens", 0), get.get("full_attention_layers", [])
    blocks = [_block(get, norm, causal, 0 if index in full else window) for index in range(get["num_layers"])]
    if mixture := get.get("experts"):
        dense = mixture.get("dense_layers", [])
        blocks = [each if place in dense else _mixed(get, mixture, each) for place, each in enumerate(blocks)]
    return [first, *blocks, last]


def _mixed(get: Mapping[str, Any], mixture: Mapping[str, Any], block: Layer) -> Layer:
    """A block without window whose MLP is a router and experts."""
    h, f, old = get["hidden_size"], mixture["ffn_hidden_size"], get["ffn_hidden_size"]
    count, copies, shared = mixture["count"], mixture["top_k"], mixture.get("shared_ffn_hidden_size", 0)
    wide = 3 if get["gated_mlp"] else 2
    routed = [Product(h, (wide - 1) * f, copies, False, count), Product(f, h, copies, True, count)]
    always = [Product(h, (wide - 1) * shared), Product(shared, h, 1.0, True)] if shared else []
    held = wide * h * f * count
    return replace(
        block,
        kind="experts",
        parameters=block.parameters - wide * h * old + held + h * count + wide * h * shared,
        products=[*block.products[:2], Product(h, count), *routed, *always],
        elementwise_bytes=block.elementwise_bytes + BF16 * wide * (copies * f + shared - old),
        # Copies are read, written and read back, sums written; scores go through memory four times in fp32.
        whole_bytes=BF16 * (3 * copies + 1) * h + 4 * FP32 * count,
        launches=block.launches + 7 + (2 if shared else 0),
        experts=(count, copies, held),
    )


def _block(get: Mapping[str, Any], norm: int, causal: bool, window: int) -> Layer:
    h, f = get["hidden_size"], get["ffn_hidden_size"]
    queries, keys = get["num_heads"] * get["head_dim"], get["num_kv_heads"] * get["head_dim"]
    up = f * (2 if get["gated_mlp"] else 1)
    weights = h * (queries + 2 * keys) + queries * h + h * up + f * h
    biases = get["qkv_bias"] * (queries + 2 * keys) + get["linear_bias"] * (h + up + h)
    # Read and written: two norms (2 each), two residuals (3 each), rotary on queries and keys, the activation.
    states = 2 * 2 * h + 2 * 3 * h
    values = states + get["rotary"] * 2 * (queries + keys) + up + f
    return Layer(
        "window" if window else "block",
        h,
        weights + biases + 2 * h * norm,
        [Product(h, queries + 2 * keys), Product(queries, h, 1.0, True), Product(h, up), Product(f, h, 1.0, True)],
        (queries, keys, causal, window, get["head_dim"]),
        BF16 * values,
        BF16 * states,
        launches=5 + 2 * get["rotary"],
        gathers=2,
        scatters=2,
    )


def mlp_of(config: Mapping[str, Any]) -> Layer:
    """Parts of a block that selective recomputation runs again: second norm, products of the MLP, activation."""
    h, f = config["hidden_size"], config["ffn_hidden_size"]
    up = f * (2 if config.get("gated_mlp") else 1)
    products = [Product(h, up), Product(f, h, 1.0, True)]
    return Layer("mlp", h, 0, products, None, BF16 * (2 * h + up + f), BF16 * 2 * h, 2, gathers=1)


def frozen(role: str, layers: Sequence[Layer], something_before_learns: bool) -> list[Layer]:
    """The layers of a module that does not learn; an encoder's projector still does."""
    still = layers[:-1] if role == "encoder" else layers
    gradients = 1 if something_before_learns else 0
    return [replace(layer, learns=False, gradients=gradients) for layer in still] + [*layers[len(still) :]]


def _products(configs: Sequence[Mapping[str, Any]]) -> list[Product]:
    return [
        Product(each["k"], each["n"], each.get("rows_per_token", 1.0), index % 2 == 1)
        for index, each in enumerate(configs)
    ]
