"""The cost model of a layer: a roofline whose efficiency depends on size (docs/costs.md).

Every operator takes the longest of its arithmetic, its memory traffic and its kernel launches; n FLOPs take
(n + half) / limit (Hockney and Jesshope, Parallel Computers, 1981, r-infinity and n-half).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, freeze, sum_in_order
from entrain_bench.base.remembered import remembered
from entrain_bench.costs.layer_times import PassTimes, Stages
from entrain_bench.costs.links import all_gather_s, all_reduce_s, all_to_all_s, name_of_exchange, peers_by_tier
from entrain_bench.costs.loads import Loads, busiest_area, compute_loads, padded, score_area
from entrain_bench.specs.cluster import FLASH1, FLASH2, FLASH3, HEAD_DIM, UNFUSED, ClusterSpec
from entrain_bench.specs.framework import BF16, CAST_BYTES, FrameworkOptions
from entrain_bench.specs.layer import BF16_BYTES, FP32_BYTES, Attention, Gemm, Layer
from entrain_bench.specs.model import ModuleSpec

GEMM_TILE = 128
# A backward multiplies twice per forward product (input and weight gradients); flash attention's recomputes the scores
# as well: five products for the forward's two. Elementwise backward reads kept tensors and one gradient.
GEMM_BACKWARD = 2.0
ATTENTION_BACKWARD = 2.5
ELEMENTWISE_BACKWARD = 2.0
# Rates of attention's forward and backward by generation of kernels, relative to FlashAttention-2. FlashAttention-3:
# 1.5 to 2.0 and 1.5 to 1.75 (arXiv:2407.08608, abstract; the middles); FlashAttention: half (arXiv:2307.08691).
FLASH_RATES = {FLASH1: (0.5, 0.5), FLASH2: (1.0, 1.0), FLASH3: (1.75, 1.625)}
# Unfused attention stores bf16 scores: a product writes, a softmax reads and writes, a product reads them. Backward
# reads probabilities, writes their gradient; its softmax reads both and writes one for two products. Products run twice
# more.
UNFUSED_SCORE_BYTES = (4 * BF16_BYTES, 7 * BF16_BYTES)
UNFUSED_BACKWARD = 2.0
# Adam reads gradient, weight and moments, and writes the latter and a bf16 weight.
OPTIMIZER_TRAFFIC_BYTES = FP32_BYTES * 7 + BF16_BYTES
MAX_KNOWN = 512
MAX_KNOWN_CHUNKS = 2048


@dataclass(frozen=True, slots=True)
class Roofline:
    """Layer times on one cluster under the settings of the framework."""

    cluster: ClusterSpec
    framework: FrameworkOptions = field(default_factory=FrameworkOptions)
    exchanges: bool = True  # False: tokens reach their experts in no time
    _known: dict[tuple[object, ...], tuple[ModuleSpec, list[PassTimes]]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def loads(self, module: ModuleSpec, lengths: IntArray, offsets: IntArray | None = None) -> Loads:
        """Return the loads of packed sequences (``compute_loads``)."""
        score = partial(score_area, kernel=self._kernel)
        return compute_loads(module, lengths, offsets, self.framework.cp_split, score)

    @property
    def _kernel(self) -> str:
        return self.framework.attention_kernel or self.cluster.device.attention_kernel

    @property
    def _elementwise_bytes_per_s(self) -> float:
        device = self.cluster.device
        return device.memory_bandwidth_bytes_per_s * device.memory_efficiency * device.elementwise_efficiency

    def gemm_s(self, gemm: Gemm, tokens: FloatArray, tp: int, cp: int, speedup: float = 1.0) -> FloatArray:
        """Forward time of a sharded matrix product; one kernel works on all groups of a grouped one.

        ``speedup``: rate over that of bf16; inputs of a faster one have 8 bits.
        """
        device = self.cluster.device
        rows = np.ceil(tokens * (gemm.rows_per_token / cp))
        if gemm.groups > 1:
            return self._grouped_s(gemm, rows, tp, speedup)
        k = gemm.k / tp if gemm.row_parallel else gemm.k
        n = gemm.n if gemm.row_parallel else gemm.n / tp
        narrow = 1.0 + device.gemm_half_width * (1.0 / k + 1.0 / n) / 2.0
        flops = 2.0 * k * float(padded(n, GEMM_TILE)) * padded(rows, GEMM_TILE) * narrow
        # Starting a product takes no power, so its time stays.
        arithmetic = (flops / (device.sustained_fraction * speedup) + device.gemm_half_flops) / (
            device.peak_bf16_flops * device.gemm_efficiency
        )
        num_bytes = BF16_BYTES * (rows * (k / gemm.taps + n) + k * n)
        if speedup > 1.0:
            num_bytes = num_bytes - (BF16_BYTES - 1) * (rows * k / gemm.taps + k * n)
        traffic = num_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
        return np.maximum(np.maximum(arithmetic, traffic), device.kernel_launch_s)

    def _grouped_s(self, gemm: Gemm, rows: FloatArray, tp: int, speedup: float) -> FloatArray:
        """The same of a grouped product: rows of each group fill tiles of their own, and all its weights are read."""
        device = self.cluster.device
        k = gemm.k / tp if gemm.row_parallel else gemm.k
        n = gemm.n if gemm.row_parallel else gemm.n / tp
        # Fewer rows than groups leave some without any.
        groups = np.minimum(gemm.groups, np.maximum(rows, 1.0))
        narrow = 1.0 + device.gemm_half_width * (1.0 / k + 1.0 / n) / 2.0
        padded_rows = groups * padded(rows / groups, GEMM_TILE)
        flops = 2.0 * k * float(padded(n, GEMM_TILE)) * padded_rows * narrow
        arithmetic = (flops / (device.sustained_fraction * speedup) + device.gemm_half_flops) / (
            device.peak_bf16_flops * device.gemm_efficiency
        )
        num_bytes = BF16_BYTES * (rows * (k + n) + groups * (k * n))
        if speedup > 1.0:
            num_bytes = num_bytes - (BF16_BYTES - 1) * (rows * k + groups * (k * n))
        traffic = num_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
        return np.maximum(np.maximum(arithmetic, traffic), device.kernel_launch_s)

    def attention_s(
        self, attention: Attention, area: FloatArray, tokens: FloatArray, tp: int, cp: int
    ) -> tuple[FloatArray, FloatArray]:
        """Forward and backward time of attention with the given padded score area and number of tokens."""
        device = self.cluster.device
        kernel = self._kernel
        if kernel == UNFUSED:
            return self._unfused_attention_s(attention, area, tp, cp)
        half = device.attention_half_head_dim
        narrow = (1.0 + half / attention.head_dim) / (1.0 + half / HEAD_DIM)
        # The n-half of a sequence: as if its queries saw that many keys more.
        scores = area + (device.attention_half_tokens * attention.rows_per_token) * tokens
        flops = (4.0 * attention.query_width * narrow / (tp * cp)) * scores
        rate = device.peak_bf16_flops * device.sustained_fraction
        # Efficiencies are of the device's own kernels, if those are unfused of FlashAttention-2.
        device_rates = FLASH_RATES.get(device.attention_kernel, FLASH_RATES[FLASH2])
        ahead, back = (mine / other for mine, other in zip(FLASH_RATES[kernel], device_rates, strict=True))
        forward = flops / (rate * (device.attention_forward_efficiency * ahead))
        backward = flops * (ATTENTION_BACKWARD / (rate * (device.attention_backward_efficiency * back)))
        return np.maximum(forward, device.kernel_launch_s), np.maximum(backward, device.kernel_launch_s)

    def _unfused_attention_s(
        self, attention: Attention, area: FloatArray, tp: int, cp: int
    ) -> tuple[FloatArray, FloatArray]:
        device = self.cluster.device
        rate = device.peak_bf16_flops * device.sustained_fraction * device.gemm_efficiency
        bandwidth = self._elementwise_bytes_per_s
        heads = attention.query_width / attention.head_dim
        passes = []
        rate = rate / (1.0 + device.gemm_half_width / attention.head_dim / 2.0)
        for products, num_bytes in zip((1.0, UNFUSED_BACKWARD), UNFUSED_SCORE_BYTES, strict=True):
            arithmetic_s = area * (products * 4.0 * attention.query_width / (tp * cp * rate))
            traffic_s = area * (num_bytes * heads / (tp * cp * bandwidth))
            passes.append(np.maximum(arithmetic_s + traffic_s, 3 * products * device.kernel_launch_s))
        return passes[0], passes[1]

    def layer_s(
        self, layer: Layer, loads: Loads, tp: int, cp: int, split: bool = False, groups: IntArray | None = None
    ) -> PassTimes:
        """Times of a layer for each chunk ``[chunks]``; a weight pass has the FLOPs of the forward's products.

        ``groups`` are the ranks of expert-parallel groups, if any.
        """
        tokens = loads.tokens
        if layer.num_experts:
            return self._with_experts_s(layer, loads, tp, cp, split, groups)
        if not layer.tensor_parallel:
            # Whole sequences on every rank: rows are shared as under context parallelism, and nothing is gathered.
            tp, cp = 1, tp * cp
        gemms = [self.gemm_s(product, tokens, tp, cp, self._speedup(layer, product)) for product in layer.gemms]
        return self._passes_s(layer, loads, gemms, tp, cp, split)

    def _speedup(self, layer: Layer, product: Gemm) -> float:
        """Rate of a product over that of bf16 ones: products of blocks may have 8 bits, adapters have none."""
        eight = self.framework.precision != BF16 and layer.recomputed and not product.adapter
        return self.cluster.device.fp8_speedup if eight else 1.0

    def _casts_s(self, layer: Layer, tokens: FloatArray, tp: int, cp: int) -> tuple[FloatArray, FloatArray]:
        """Seconds of casts to 8 bits: of inputs in forward, and of gradients of outputs in backward."""
        sizes = np.zeros(2)
        for product in layer.gemms:
            if self._speedup(layer, product) > 1.0:
                own = (product.k / tp, product.n) if product.row_parallel else (product.k, product.n / tp)
                sizes += product.rows_per_token * np.array(own)
        each = CAST_BYTES[self.framework.precision] / (cp * self._elementwise_bytes_per_s)
        return tokens * (each * sizes[0]), tokens * (each * sizes[1])

    def _with_experts_s(
        self, layer: Layer, loads: Loads, tp: int, cp: int, split: bool, groups: IntArray | None
    ) -> PassTimes:
        """Times of a layer with experts, whose rows all ranks of a group share; a rank's busiest experts decide."""
        ep = 1 if groups is None else groups.shape[1]
        tokens = loads.tokens
        routed = (tokens if loads.routed is None else loads.routed) * layer.busiest_experts(ep)
        gemms = [
            self.gemm_s(product, tokens, tp, cp, self._speedup(layer, product))
            if product.groups == 1
            else self.gemm_s(
                replace(product, groups=product.groups // ep), routed, tp, cp, self._speedup(layer, product)
            )
            for product in layer.gemms
        ]
        times = self._passes_s(layer, loads, gemms, tp, cp, split)
        if groups is None or ep == 1 or not self.exchanges:
            return times
        sent = self._exchange_s(layer, np.maximum(tokens, routed), tp, cp, groups)
        back = sent * (layer.backward_share > 0)
        return replace(times, forward_comm_s=times.forward_comm_s + sent, backward_comm_s=times.backward_comm_s + back)

    def _exchange_s(self, layer: Layer, tokens: FloatArray, tp: int, cp: int, groups: IntArray) -> FloatArray:
        """Dispatch and combine of a pass: each rank's tokens to the ranks of their experts, and back.

        Tensor-parallel ranks, which share experts as in Megatron-LM, then gather and scatter every copy of a token,
        and not once each token as in the layer's own gathers.
        """
        num_bytes = (BF16_BYTES * layer.expert_copies * layer.hidden_size / (tp * cp)) * tokens
        ways = [all_to_all_s(num_bytes, peers, self.cluster.tiers) for peers in peers_by_tier(groups, self.cluster)]
        seconds = 2.0 * np.maximum.reduce(ways)
        if tp > 1:
            states = (BF16_BYTES * layer.hidden_size / cp) * tokens
            tier = self.cluster.group_tier(np.arange(tp))
            more = all_gather_s(layer.expert_copies * states, tp, tier) - all_gather_s(states, tp, tier)
            seconds = seconds + 2.0 * more
        return np.asarray(seconds)

    def _passes_s(
        self, layer: Layer, loads: Loads, gemms: Sequence[FloatArray], tp: int, cp: int, split: bool
    ) -> PassTimes:
        """Times of a layer whose products take ``gemms`` forward."""
        tokens = loads.tokens
        gemm = sum_in_order(gemms, tokens)
        elementwise, elementwise_back = self._elementwise_s(layer, tokens, tp, cp)
        forward = gemm + elementwise
        products = GEMM_BACKWARD * layer.backward_share * gemm
        adapters = sum_in_order([s for s, product in zip(gemms, layer.gemms, strict=True) if product.adapter], tokens)
        if layer.adapter_parameters:
            # Gradients of all inputs, and of the adapters' weights.
            products = gemm + adapters
        backward = products + elementwise_back
        if self.framework.precision != BF16:
            casts, casts_back = self._casts_s(layer, tokens, tp, cp)
            forward = forward + casts
            backward = backward + casts_back
        if layer.attention:
            ahead, back = self.attention_s(layer.attention, busiest_area(layer, loads, cp), tokens, tp, cp)
            forward = forward + ahead
            backward = backward + back
        if not layer.backward_share:
            backward = np.zeros_like(tokens)
        columns = [seconds for seconds, product in zip(gemms, layer.gemms, strict=True) if not product.row_parallel]
        weight = None
        put_off = 0
        if split:
            weight, put_off = (gemm, len(gemms)) if layer.learns else (adapters, len(layer.adapters))
            backward = backward - weight
            weight = np.maximum(weight, put_off * self.cluster.device.host_launch_s)
        forward, backward = self._issued_s(layer, forward, backward, put_off)
        comm, comm_backward = self.comm_s(layer, tokens, tp, cp, (forward, backward), columns, split)
        return PassTimes(forward, comm, backward, comm_backward, weight)

    def _issued_s(
        self, layer: Layer, forward: FloatArray, backward: FloatArray, put_off: int
    ) -> tuple[FloatArray, FloatArray]:
        """Return passes that take at least the host's time to issue kernels; ``put_off`` of backward run elsewhere."""
        host_s = self.cluster.device.host_launch_s
        others = layer.num_elementwise_kernels
        attention = 0 if layer.attention is None else 3 if self._kernel == UNFUSED else 1
        ahead = len(layer.gemms) + others + attention
        twice = layer.backward_elementwise_bytes_per_token is None
        products = GEMM_BACKWARD * layer.backward_share * len(layer.gemms)
        if layer.adapter_parameters:
            products = len(layer.gemms) + len(layer.adapters)
        back = products + (ELEMENTWISE_BACKWARD if twice else 1) * others
        back = (back + attention * (2 if self._kernel == UNFUSED else 1) - put_off) * (layer.backward_share > 0)
        return np.maximum(forward, ahead * host_s), np.maximum(backward, back * host_s)

    def comm_s(
        self,
        layer: Layer,
        tokens: FloatArray,
        tp: int,
        cp: int,
        compute_s: tuple[FloatArray, FloatArray],
        columns_s: Sequence[FloatArray] = (),
        split: bool = False,
    ) -> tuple[FloatArray, FloatArray]:
        """Exposed communication inside one layer's forward and backward for each chunk ``[chunks]``.

        ``compute_s`` is its forward and backward without communication; ``columns_s`` are forwards of its
        column-parallel products, under which communication hides, if known.
        """
        comm = comm_backward = np.zeros_like(tokens)
        if tp > 1 and layer.num_gathers + layer.num_scatters:
            ahead, back, hidden = self._tensor_parallel_s(layer, tokens, tp, cp, columns_s[: layer.num_gathers], split)
            comm = self._exposed_s(ahead, np.zeros_like(ahead), compute_s[0])
            comm_backward = self._exposed_s(back, hidden, compute_s[1])
        if layer.gathered_width and tp > 1:
            # Backward takes a rank's own part.
            tier = self.cluster.group_tier(np.arange(tp))
            comm = comm + all_gather_s((BF16_BYTES * layer.gathered_width / cp) * tokens, tp, tier)
        if layer.attention and cp > 1 and layer.tensor_parallel:
            # Keys and values are gathered over the group in both passes; backward scatters their gradients as well.
            (tier,) = self.cluster.ring_tiers(np.arange(0, tp * cp, tp)[None])
            width = 2 * BF16_BYTES * layer.attention.key_value_width / tp
            gather = all_gather_s(width * tokens, cp, tier)
            comm = comm + gather
            comm_backward = comm_backward + 2 * gather
        return comm, comm_backward if layer.backward_share else np.zeros_like(tokens)

    def layers_s(
        self,
        module: ModuleSpec,
        loads: Loads,
        tp: int,
        cp: int,
        split: bool = False,
        groups: IntArray | None = None,
    ) -> list[PassTimes]:
        """Times of one layer of each of the module's kinds for each chunk, each ``[chunks]``; read-only."""
        parts = self.framework.sequence_parts(module, cp)

        def made() -> tuple[ModuleSpec, list[PassTimes]]:
            # With the module, so that no other gets its identity.
            kinds = module.padded(tp).kinds
            return module, [self.of(module)._kind_s(layer, loads, tp, parts, split, groups) for layer in kinds]

        if len(loads.tokens) > MAX_KNOWN_CHUNKS:
            return made()[1]
        exchange = name_of_exchange(groups, self.cluster)
        return remembered(self._known, (id(module), tp, parts, split, exchange, loads.content), made, MAX_KNOWN)[1]

    def _kind_s(self, layer: Layer, loads: Loads, tp: int, cp: int, split: bool, groups: IntArray | None) -> PassTimes:
        times = self.layer_s(layer, loads, tp, cp, split, groups)
        if layer.remade is not None:
            again = self.layer_s(layer.remade, loads, tp, cp, groups=groups)
            times = replace(times, remade_s=again.forward_s, remade_comm_s=again.forward_comm_s)
        freeze(*times.columns, *times.again)
        return times

    def of(self, module: ModuleSpec) -> "Roofline":
        """Return the roofline with a module's own settings."""
        return replace(self, framework=self.framework.of(module))

    def _elementwise_s(self, layer: Layer, tokens: FloatArray, tp: int, cp: int) -> tuple[FloatArray, FloatArray]:
        device = self.cluster.device
        bandwidth = self._elementwise_bytes_per_s
        replicated = layer.replicated_elementwise_bytes_per_token
        shared = layer.split_parts(tp)
        launches = layer.num_elementwise_kernels * device.kernel_launch_s

        def seconds(moved: float, hidden: float, whole: float) -> FloatArray:
            a_rank = (moved - hidden) / shared + hidden / (tp if self.framework.sequence_parallel else 1) + whole
            return np.maximum((a_rank / (cp * bandwidth)) * tokens, launches)

        whole = layer.whole_elementwise_bytes_per_token
        forward = seconds(layer.elementwise_bytes_per_token, replicated, whole)
        if layer.backward_elementwise_bytes_per_token is None:
            return forward, ELEMENTWISE_BACKWARD * forward
        hidden_bytes = ELEMENTWISE_BACKWARD * replicated
        whole_bytes = ELEMENTWISE_BACKWARD * whole
        return forward, seconds(layer.backward_elementwise_bytes_per_token, hidden_bytes, whole_bytes)

    def _tensor_parallel_s(
        self, layer: Layer, tokens: FloatArray, tp: int, cp: int, columns: Sequence[FloatArray], split: bool
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return tensor-parallel communication seconds of a layer: forward, backward, and the hidden part of it.

        megatron-core 0.19 (``LinearWithGradAccumulationAndAsyncCommunication``) overlaps an input's gather with the
        product for its gradient, and that gradient's transfer with the weight's product.
        """
        states = (BF16_BYTES * layer.hidden_size / cp) * tokens
        tier = self.cluster.group_tier(np.arange(tp))
        overlaps = layer.learns
        one = all_gather_s(states, tp, tier)
        both = all_reduce_s(states, tp, tier)
        if self.framework.sequence_parallel:
            forward = (layer.num_gathers + layer.num_scatters) * one
            # Without a weight product there is no second gather, and no product hides communication.
            backward = forward + layer.num_gathers * one if overlaps else forward
            hidden = [(1 if split else 2) * np.minimum(one, product) for product in columns]
        else:
            forward = layer.num_scatters * both
            backward = layer.num_gathers * both
            hidden = [np.minimum(both, product) for product in columns if not split]
        return forward, backward, sum_in_order(hidden if overlaps else [], tokens)

    def _exposed_s(self, comm: FloatArray, hidden: FloatArray, compute: FloatArray) -> FloatArray:
        """Return exposed communication seconds: products hide a part, and ``tp_overlap`` hides a share of the rest."""
        exposed = (1.0 - self.framework.tp_overlap) * (comm - hidden)
        return np.maximum(exposed + self.cluster.device.overlap_cost * (comm - exposed), comm - compute)

    def stages_s(self, module: ModuleSpec, loads: Loads, stages: Stages, split: bool = False) -> PassTimes:
        """Times of each chunk on each stage ``[chunks, stages]``; ``split``: weights have a pass of their own."""
        totals = np.zeros((4 + split, len(loads.tokens), len(stages.counts)))
        again = stages.remade(module)
        layers_s = self.layers_s(module, loads, stages.tp, stages.cp, split, stages.groups)
        for index, (layer, times) in enumerate(zip(module.kinds, layers_s, strict=True)):
            for total, column in zip(totals, times.columns, strict=True):
                total += column[:, None] * stages.counts[:, index]
            if layer.backward_share and again[..., index].any():
                for total, column in zip(totals[2:4], times.again, strict=True):
                    total += column[:, None] * again[..., index]
        return PassTimes(*totals)

    def work_s(self, module: ModuleSpec, loads: Loads, stages: Stages) -> FloatArray:
        """Least time of each stage, however packed: an even share of all that is packed is never slower."""
        return self.stages_s(module, replace(loads, packs=None), stages).total_s

    def knows(self, module: ModuleSpec, tp: int) -> bool:
        """Whether that tensor-parallel degree splits a module; all times are known."""
        return module.splits_into(tp)

    def gpu_s(self, module: ModuleSpec, loads: Loads, counts: FloatArray) -> FloatArray:
        """Least GPU time of each stage for a chunk's sequences ``[chunks, stages]``: one GPU, no recomputation."""
        return self.work_s(module, loads, Stages(counts))

    def optimizer_s(self, parameters: FloatArray) -> FloatArray:
        """Time of the optimizer step over parameters whose states a rank holds, of the shape given."""
        bandwidth = self.cluster.device.memory_bandwidth_bytes_per_s * self.cluster.device.memory_efficiency
        moved = OPTIMIZER_TRAFFIC_BYTES + self.framework.cast_bytes
        return np.asarray(parameters * (moved / bandwidth))
