"""Layers of a module as its YAML states it, and what each takes: a roofline for one packed chunk at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Product:
    """``[tokens * rows, k] @ [k, n]``."""

    k: float
    n: float
    rows: float = 1.0
    splits_k: bool = False


@dataclass(frozen=True)
class Layer:
    """One layer; attention as widths of queries and of keys, whether it is causal, and its window (0: none)."""

    kind: str
    hidden: int
    parameters: float
    products: list[Product] = field(default_factory=list)
    attention: tuple[int, int, bool, int] | None = None
    elementwise_bytes: float = 0.0
    launches: int = 0
    collectives: int = 0


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of both passes, communication inside them apart."""

    forward: float
    forward_comm: float
    backward: float
    backward_comm: float


def layers_of(config: Mapping[str, Any]) -> list[Layer]:
    """The layers of a module: embedding, blocks, head (docs/costs.md; no U-Nets)."""
    assert "unet" not in config
    get = {"rotary": True, "norm_bias": False, "qkv_bias": False, "linear_bias": False, "head_norm": True, **config}
    hidden, norm = get["hidden_size"], 2 if get["norm_bias"] else 1
    causal = get["role"] == "llm"
    if causal:
        words = get["vocab_size"]
        first = Layer("embed", hidden, words * hidden, elementwise_bytes=2 * BF16 * hidden, launches=1, collectives=1)
        # The final norm; logits become fp32, and one pass over those makes softmax and loss.
        traffic = 2 * BF16 * hidden + words * (BF16 + FP32 + 2 * FP32)
        held = hidden * words + hidden * norm
        last = Layer("head", hidden, held, [Product(hidden, words)], None, traffic, launches=3, collectives=1)
    else:
        embed, head = (_products(get[name]) for name in ("embed_gemms", "head_gemms"))
        held = sum(each.k * each.n + (each.n if get["norm_bias"] else 0) for each in embed)
        traffic = BF16 * sum((each.k + each.n) * each.rows for each in embed)
        first = Layer("embed", hidden, held, embed, None, traffic, len(embed))
        held = sum(each.k * each.n + each.n for each in head) + (hidden * norm if get["head_norm"] else 0)
        traffic = 2 * BF16 * (hidden + sum(each.n * each.rows for each in head[:-1]))
        last = Layer("head", hidden, held, head, None, traffic, 1 + len(head), collectives=2)
    window, full = get.get("window_tokens", 0), get.get("full_attention_layers", [])
    blocks = [_block(get, norm, causal, 0 if index in full else window) for index in range(get["num_layers"])]
    return [first, *blocks, last]


def _block(get: Mapping[str, Any], norm: int, causal: bool, window: int) -> Layer:
    h, f = get["hidden_size"], get["ffn_hidden_size"]
    queries, keys = get["num_heads"] * get["head_dim"], get["num_kv_heads"] * get["head_dim"]
    up = f * (2 if get["gated_mlp"] else 1)
    weights = h * (queries + 2 * keys) + queries * h + h * up + f * h
    biases = get["qkv_bias"] * (queries + 2 * keys) + get["linear_bias"] * (h + up + h)
    # Read and written: two norms (2 each), two residuals (3 each), rotary on queries and keys, the activation.
    values = 2 * 2 * h + 2 * 3 * h + get["rotary"] * 2 * (queries + keys) + up + f
    return Layer(
        "window" if window else "block",
        h,
        weights + biases + 2 * h * norm,
        [Product(h, queries + 2 * keys), Product(queries, h, 1.0, True), Product(h, up), Product(f, h, 1.0, True)],
        (queries, keys, causal, window),
        BF16 * values,
        launches=5 + 2 * get["rotary"],
        collectives=4,
    )


def _products(configs: Sequence[Mapping[str, Any]]) -> list[Product]:
    return [
        Product(each["k"], each["n"], each.get("rows_per_token", 1.0), index % 2 == 1)
        for index, each in enumerate(configs)
    ]


@dataclass(frozen=True)
class Machine:
    """Devices and links of a cluster YAML."""

    config: Mapping[str, Any]

    def tier(self, ranks: Sequence[int]) -> tuple[float, float]:
        """Latency and bandwidth of the innermost links that join ranks."""
        for tier in self.config["tiers"]:
            size = tier.get("num_ranks", self.config["num_nodes"] * self.config["gpus_per_node"])
            if min(ranks) // size == max(ranks) // size:
                break
        return tier["latency_s"], tier["bandwidth_bytes_per_s"]

    def tier_number(self, ranks: Sequence[int]) -> int:
        """The same as a place among the tiers."""
        found = self.tier(ranks)
        return next(
            place
            for place, tier in enumerate(self.config["tiers"])
            if (tier["latency_s"], tier["bandwidth_bytes_per_s"]) == found
        )

    def gather_s(self, num_bytes: float, ranks: Sequence[int], count: int | None = None) -> float:
        """Ring all-gather, or reduce-scatter, over ranks (or as many as counted)."""
        count, (latency, bandwidth) = len(ranks) if count is None else count, self.tier(ranks)
        return (count - 1) * latency + num_bytes * (count - 1) / count / bandwidth

    def elementwise_s(self, num_bytes: float) -> float:
        """Device memory traffic."""
        device = self.config["device"]
        return num_bytes / (device["memory_bandwidth_bytes_per_s"] * device["memory_efficiency"])

    def layer_times(self, layer: Layer, lengths: Sequence[int], tp: int, cp: int) -> LayerTimes:
        """One layer on one chunk of sequences of the given lengths."""
        device, tokens = self.config["device"], sum(lengths)
        launch, peak = device["kernel_launch_s"], device["peak_bf16_flops"]
        products = 0.0
        for each in layer.products:
            rows, k, n = ceil(tokens * each.rows / cp), each.k, each.n
            k, n = (k / tp, n) if each.splits_k else (k, n / tp)
            flops = 2 * k * _tiles(n, 128) * _tiles(rows, 128)
            moved = BF16 * (rows * k + k * n + rows * n)
            products += max(flops / (peak * device["gemm_efficiency"]), self.elementwise_s(moved), launch)
        traffic = self.elementwise_s(layer.elementwise_bytes * tokens / tp / cp)
        others = max(traffic, layer.launches * launch)
        forward, backward = products + others, 2 * products + 2 * others
        forward_comm = backward_comm = 0.0
        if tp > 1:
            moved = BF16 * layer.hidden * tokens / cp
            forward_comm = backward_comm = layer.collectives * self.gather_s(moved, range(tp))
        if layer.attention:
            queries, keys, causal, window = layer.attention
            area = sum(_score_tiles(length, causal, window) for length in lengths)
            flops = 4 * queries * area / tp / cp
            forward += max(flops / (peak * device["attention_forward_efficiency"]), launch)
            backward += max(2.5 * flops / (peak * device["attention_backward_efficiency"]), launch)
            if cp > 1:
                moved = 2 * BF16 * keys / tp * tokens
                gather = self.gather_s(moved, range(tp * cp), cp)
                forward_comm, backward_comm = forward_comm + gather, backward_comm + 2 * gather
        return LayerTimes(forward, forward_comm, backward, backward_comm)


def _tiles(size: float, tile: int) -> float:
    return ceil(size / tile) * tile


def _score_tiles(length: int, causal: bool, window: int) -> float:
    """Padded elements of one sequence's score matrix."""
    if window:
        windows = [window] * (length // window) + [length % window]
        return sum(_tiles(each, 128) * _tiles(each, 64) for each in windows)
    rows, columns = _tiles(length, 128), _tiles(length, 64)
    return min(rows * columns, rows * (columns + 128) / 2) if causal else rows * columns
