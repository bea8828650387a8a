"""What a layer takes on a machine: a roofline for one packed chunk at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from support.independent.layers import BF16, Layer, LayerTimes, Product


@dataclass(frozen=True)
class Machine:
    """Devices and links of a cluster YAML under settings of the framework."""

    config: Mapping[str, Any]
    framework: Mapping[str, Any]

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

    def collective(self, ranks: Sequence[int]) -> tuple[float, float]:
        """Seconds until the first byte of a collective over ranks moves, and the bandwidth that it attains."""
        tier = self.config["tiers"][self.tier_number(ranks)]
        share = tier.get("collective_efficiency", 1.0)
        return tier.get("collective_start_s", 0.0), tier["bandwidth_bytes_per_s"] * share

    def gather_s(self, num_bytes: float, ranks: Sequence[int], count: int | None = None) -> float:
        """Ring all-gather, or reduce-scatter, over ranks (or as many as counted)."""
        count, latency, (start, bandwidth) = count or len(ranks), self.tier(ranks)[0], self.collective(ranks)
        return start * (count > 1) + (count - 1) * latency + num_bytes * (count - 1) / count / bandwidth

    def reduce_s(self, num_bytes: float, ranks: Sequence[int], *, ring: bool = False) -> float:
        """All-reduce: a reduce-scatter and an all-gather that start together; over a ring or the innermost links."""
        once = self.ring_s(num_bytes, ranks) if ring else self.gather_s(num_bytes, ranks)
        return 2 * once - (self.collective(ranks)[0] if len(ranks) > 1 else 0.0)

    def ring_s(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """The same over a ring that leaves a block over the links of all its ranks there."""
        latency, slowest, inside = self.tier(ranks)[0], float("inf"), 1
        for tier in self.config["tiers"]:
            size = tier.get("num_ranks", self.config["num_nodes"] * self.config["gpus_per_node"])
            members = Counter(rank // inside for rank in ranks)
            if len({member // (size // inside) for member in members}) < len(members):
                attained = tier["bandwidth_bytes_per_s"] * tier.get("collective_efficiency", 1.0)
                slowest = min(slowest, min(members.values()) * attained)
            inside = size
        start = self.collective(ranks)[0] if len(ranks) > 1 else 0.0
        return start + (len(ranks) - 1) * (latency + num_bytes / len(ranks) / slowest)

    def elementwise_s(self, num_bytes: float) -> float:
        """Traffic of kernels that compute on the way."""
        return self.moved_s(num_bytes) / self.config["device"].get("elementwise_efficiency", 1.0)

    def moved_s(self, num_bytes: float) -> float:
        """Device memory traffic."""
        device = self.config["device"]
        return num_bytes / (device["memory_bandwidth_bytes_per_s"] * device["memory_efficiency"])

    def product_s(self, product: Product, tokens: int, tp: int, cp: int) -> float:
        """One product of a forward."""
        device, rows, k, n = self.config["device"], ceil(tokens * product.rows / cp), product.k, product.n
        k, n = (k / tp, n) if product.splits_k else (k, n / tp)
        # At a width of half the size, products take twice as long; the width's inverse is the mean of both inverses.
        narrow = 1 + device.get("gemm_half_width", 0.0) * (1 / k + 1 / n) / 2
        used = min(product.weights, max(rows, 1))
        flops = 2 * k * _tiles(n, 128) * used * _tiles(rows / used, 128) * narrow / device["sustained_fraction"]
        flops += device["gemm_half_flops"]
        moved = BF16 * (rows * k + used * k * n + rows * n)
        arithmetic = flops / (device["peak_bf16_flops"] * device["gemm_efficiency"])
        return max(arithmetic, self.moved_s(moved), device["kernel_launch_s"])

    def layer_times(
        self,
        layer: Layer,
        lengths: Sequence[int],
        tp: int,
        cp: int,
        split: bool,
        meeting: tuple[float, list[list[int]]] | None = None,
    ) -> LayerTimes:
        """One layer on one chunk of sequences of the given lengths; the products for weights may be put off.

        ``meeting``: tokens that a rank's experts have a share of, and the ranks of groups that exchange them.
        """
        device, tokens = self.config["device"], sum(lengths)
        routed, groups = meeting or (tokens, [[0]])
        products = [
            self.product_s(each, tokens, tp, cp)
            if each.weights == 1
            else self.product_s(replace(each, weights=each.weights // len(groups[0])), routed, tp, cp)
            for each in layer.products
        ]
        states, rest = layer.hidden_bytes, layer.elementwise_bytes - layer.hidden_bytes
        shared = tp if self.framework["sequence_parallel"] else 1
        parts = 1 if layer.gathered else tp
        traffic = self.elementwise_s((rest / parts + states / shared + layer.whole_bytes) * tokens / cp)
        others = max(traffic, layer.launches * device["kernel_launch_s"])
        after = 2 * others
        if layer.returned_bytes is not None:
            other = (layer.returned_bytes - 2 * states) / parts + 2 * states / shared
            after = max(self.elementwise_s(other * tokens / cp), layer.launches * device["kernel_launch_s"])
        weight = sum(products) if split and layer.learns else 0.0
        forward, backward = sum(products) + others, layer.gradients * sum(products) + after - weight
        across, kernels = 0.0, len(products) + layer.launches
        # Kernels that only move data run as often, or twice.
        moving = layer.launches * (2 if layer.returned_bytes is None else 1)
        back_kernels = layer.gradients * len(products) + moving - (len(products) if weight else 0)
        if layer.attention:
            ahead, back = self._attention_s(layer.attention, lengths, tp * cp)
            forward, backward = forward + ahead, backward + back
            whole = self.kernel == "unfused"
            kernels, back_kernels = kernels + (3 if whole else 1), back_kernels + (6 if whole else 1)
            if cp > 1:
                keys = layer.attention[1]
                across = self.ring_s(2 * BF16 * keys / tp * tokens, range(0, tp * cp, tp))
        host = device.get("host_launch_s", 0.0)
        forward, backward = max(forward, host * kernels), max(backward, host * back_kernels)
        if weight:
            weight = max(weight, host * len(products))
        states = BF16 * layer.hidden * tokens / cp
        one, both = self.gather_s(states, range(tp)), self.reduce_s(states, range(tp))
        columns = [took for took, each in zip(products, layer.products, strict=True) if not each.splits_k]
        ahead, back, hidden = self._collectives_s(layer, one, both, columns[: layer.gathers], split)
        forward_comm = self._exposed_s(ahead, 0.0, forward) + across
        if layer.gathered and tp > 1:
            forward_comm += self.gather_s(layer.gathered * tokens / cp, range(tp))
        backward_comm = self._exposed_s(back, hidden, backward) + 2 * across
        if layer.experts and len(groups[0]) > 1:
            sent = self._exchange_s(layer.experts[1], layer.hidden, max(tokens, routed) / cp, tp, groups)
            forward_comm, backward_comm = forward_comm + sent, backward_comm + sent
        if not layer.gradients:
            backward = backward_comm = 0.0
        return LayerTimes(forward, forward_comm, backward, backward_comm, weight)

    def _exchange_s(self, copies: int, hidden: int, tokens: float, tp: int, groups: list[list[int]]) -> float:
        """There and back: every copy of a token to another rank, then over tensor-parallel ranks instead of a token."""
        size, slowest = BF16 * copies * hidden * tokens / tp, 0.0
        for group in groups:
            for rank in group:
                links: dict[int, list[int]] = {}
                for other in group:
                    if other != rank:
                        links.setdefault(self.tier_number([rank, other]), []).append(other)
                begun = sum(len(behind) * self.config["tiers"][tier]["latency_s"] for tier, behind in links.items())
                begun += max(self.collective([rank, behind[0]])[0] for behind in links.values())
                moved = [
                    size * len(behind) / len(group) / self.collective([rank, behind[0]])[1] for behind in links.values()
                ]
                slowest = max(slowest, begun + max(moved))
        state = BF16 * hidden * tokens
        return 2 * (slowest + self.gather_s(copies * state, range(tp)) - self.gather_s(state, range(tp)))

    def _attention_s(
        self, attention: tuple[int, int, bool, int, int], lengths: Sequence[int], parts: int
    ) -> tuple[float, float]:
        """Forward and backward."""
        device, (queries, _, causal, window, head) = self.config["device"], attention
        if self.kernel == "unfused":
            area = sum(_score_tiles(length, False, window) for length in lengths)
            return self._stored_attention_s(area * queries / parts, head)
        half = device["attention_half_head_dim"]
        area = sum(
            _score_tiles(length, causal, window) + device["attention_half_tokens"] * length for length in lengths
        )
        flops = 4 * queries * area / parts * (1 + half / head) / (1 + half / 128)
        peak, launch = device["peak_bf16_flops"] * device["sustained_fraction"], device["kernel_launch_s"]
        # FlashAttention-2 takes half as long as its predecessor, its successor 4 / 7 and 8 / 13 of that.
        relative = {"flash1": (2.0, 2.0), "flash2": (1.0, 1.0), "flash3": (4 / 7, 8 / 13)}
        mine, own = relative[self.kernel], relative[device.get("attention_kernel", "flash2")]
        ahead = max(flops / (peak * device["attention_forward_efficiency"]) * mine[0] / own[0], launch)
        return ahead, max(2.5 * flops / (peak * device["attention_backward_efficiency"]) * mine[1] / own[1], launch)

    @property
    def kernel(self) -> str:
        """Generation of attention kernels."""
        return str(self.framework["attention_kernel"] or self.config["device"].get("attention_kernel", "flash2"))

    def _stored_attention_s(self, area: float, head: int) -> tuple[float, float]:
        """Forward and backward of attention that stores bf16 scores: 4 and 7 passes over them, 2 and 4 products."""
        device = self.config["device"]
        rate = device["peak_bf16_flops"] * device["sustained_fraction"] * device["gemm_efficiency"]
        # Products as narrow as a head, in one of two dimensions.
        rate /= 1 + device.get("gemm_half_width", 0.0) / (2 * head)
        launch, over = device["kernel_launch_s"], self.elementwise_s(BF16 * area / head)
        return max(2 * 2 * area / rate + 4 * over, 3 * launch), max(4 * 2 * area / rate + 7 * over, 6 * launch)

    def _collectives_s(
        self, layer: Layer, one: float, both: float, columns: Sequence[float], split: bool
    ) -> tuple[float, float, float]:
        """Of forward, of backward, what hides in backward; from an all-gather and an all-reduce of hidden states."""
        # Beside an input's gradient, and beside a weight's.
        beside_input, beside_weight = columns, [] if split else columns
        if self.framework["sequence_parallel"]:
            ahead = (layer.gathers + layer.scatters) * one
            back = ahead + (layer.gathers * one if layer.learns else 0.0)
            hidden = sum(min(one, product) for product in [*beside_input, *beside_weight])
        else:
            ahead, back = layer.scatters * both, layer.gathers * both
            hidden = sum(min(both, product) for product in beside_weight)
        return ahead, back, hidden if layer.learns else 0.0

    def _exposed_s(self, comm: float, hidden: float, compute: float) -> float:
        """Seconds left after the framework's overlap, which slows computation; at most that hides."""
        left = (1 - self.framework["tp_overlap"]) * (comm - hidden)
        return max(left + self.slowing * (comm - left), comm - compute)

    @property
    def slowing(self) -> float:
        """Seconds that computation loses per second of communication beside it."""
        return float(self.config["device"].get("overlap_cost", 0.0))


def _tiles(size: float, tile: int) -> float:
    return ceil(size / tile) * tile


def _score_tiles(length: int, causal: bool, window: int) -> float:
    """Padded elements of one sequence's score matrix."""
    if window:
        windows = [window] * (length // window) + [length % window]
        return sum(_tiles(each, 128) * _tiles(each, 64) for each in windows)
    rows, columns = _tiles(length, 128), _tiles(length, 64)
    return min(rows * columns, rows * (columns + 128) / 2) if causal else rows * columns
