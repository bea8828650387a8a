"""A conditional U-Net as a sequence of layers, Stable Diffusion's (arXiv:2112.10752); a token is a latent position."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from entrain_bench.base.errors import require
from entrain_bench.specs.layer import BF16_BYTES, Attention, Gemm, Layer
from entrain_bench.specs.parse import Count

# A 3 x 3 convolution; with stride 2 each value is read for a quarter of the taps.
TAPS = 9
STRIDED_TAPS = TAPS / 4
HEAD_DIM = 64  # Stable Diffusion 2.1: 5, 10, 20 and 20 heads of 320, 640, 1280 and 1280 channels (unet/config.json)


@dataclass(frozen=True, slots=True)
class UNetConfig:
    """Sizes by the names of diffusers' ``unet/config.json``."""

    in_channels: Count  # of the latent image, predicted again
    block_out_channels: tuple[Count, ...]  # of each level
    attention_levels: tuple[int, ...]  # levels whose blocks have a transformer, from 0 (``CrossAttn...`` blocks)
    layers_per_block: Count  # residual blocks of a level on the way down; one more on the way up
    cross_attention_dim: Count  # width of the context tokens
    context_tokens: Count  # that an image is conditioned on


def check_unet(config: UNetConfig, where: str) -> None:
    """Raise ``UserError`` for a net without levels, or with attention on levels that it does not have."""
    channels = config.block_out_channels
    levels = config.attention_levels
    require(bool(channels), f"{where}.block_out_channels", [*channels], "one or more")
    inside = all(0 <= level < len(channels) for level in levels)
    require(inside, f"{where}.attention_levels", [*levels], f"levels in 0..{len(channels) - 1}")


@dataclass(slots=True)
class _Builder:
    """Layers so far, and the state on the way through the net."""

    config: UNetConfig
    positions: int
    channels: int = 0
    rows: float = 1.0
    skips: list[tuple[int, float]] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)

    @property
    def time_width(self) -> int:
        """Width of the embedding of the diffusion step."""
        return 4 * self.config.block_out_channels[0]

    def add(
        self,
        kind: str,
        gemms: Sequence[Gemm],
        parameters: int,
        moved: float,
        kernels: int,
        kept: float,
        inputs: float,
        attention: Attention | None = None,
    ) -> None:
        """Append a layer; ``moved`` (elementwise traffic), ``kept`` and ``inputs`` are values a token."""
        shared = (self.time_width + self.config.context_tokens * self.config.cross_attention_dim) / self.positions
        pending = sum(channels * rows for channels, rows in self.skips)
        self.layers.append(
            Layer(
                kind=kind,
                gemms=tuple(gemms),
                attention=attention,
                elementwise_bytes_per_token=BF16_BYTES * moved,
                num_elementwise_kernels=kernels,
                hidden_size=round(self.channels * self.rows + pending + shared),
                parameters=parameters,
                activation_bytes_per_token=BF16_BYTES * kept,
                input_bytes_per_token=BF16_BYTES * inputs,
                tensor_parallel=False,
            )
        )

    def convolution(self, inputs: int, outputs: int, taps: float = TAPS) -> Gemm:
        """A 3 x 3 convolution at the current resolution of the output."""
        return Gemm(TAPS * inputs, outputs, rows_per_token=self.rows, taps=taps)

    def embed(self, projection: Sequence[Gemm]) -> None:
        """Context projection, first convolution, and the two layers that embed the diffusion step."""
        first = self.channels = self.config.block_out_channels[0]
        width = self.time_width
        time = [Gemm(k, width, rows_per_token=1 / self.positions) for k in (first, width)]
        gemms = (*projection, self.convolution(self.config.in_channels, first), *time)
        inputs = sum(gemm.k * gemm.rows_per_token for gemm in projection) + self.config.in_channels
        self.add("embed", gemms, _parameters(gemms), inputs + first, len(gemms), inputs, inputs)
        self.skips.append((self.channels, self.rows))

    def block(self, outputs: int) -> None:
        """A residual block: norm, SiLU and convolution twice, the step's embedding added in between."""
        inputs = self.channels
        rows = self.rows
        width = self.time_width
        self.channels = outputs
        gemms = [self.convolution(inputs, outputs), self.convolution(outputs, outputs)]
        gemms.append(Gemm(width, outputs, rows_per_token=1 / self.positions))
        if inputs != outputs:
            gemms.append(Gemm(inputs, outputs, rows_per_token=rows))
        norms = 2 * (inputs + outputs)
        # Two fused norms with SiLU, one residual addition; both norms' inputs and outputs are kept.
        moved = (2 * inputs + 5 * outputs) * rows
        name = f"residual {inputs}-{outputs} x{rows:g}"
        self.add(name, gemms, _parameters(gemms) + norms, moved, 3, norms * rows, inputs * rows)

    def transformer(self) -> None:
        """A transformer block between two projections, as two layers: self-attention; cross-attention and GEGLU."""
        c = self.channels
        rows = self.rows
        width = self.config.cross_attention_dim
        context = self.config.context_tokens
        self_gemms = [Gemm(c, n, rows_per_token=rows) for n in (c, 3 * c, c)]
        # Group norm, layer norm, residual; kept: inputs and outputs of norms, queries, keys, values, attention output.
        attention = Attention(c, c, causal=False, rows_per_token=rows, head_dim=HEAD_DIM)
        parameters = sum(g.k * g.n for g in self_gemms) + 6 * c
        name = f"self-attention {c} x{rows:g}"
        self.add(name, self_gemms, parameters, 7 * c * rows, 3, 8 * c * rows, c * rows, attention)
        once = context / self.positions
        sizes = (c, c), (c, c), (c, 8 * c), (4 * c, c), (c, c)
        cross_gemms = [Gemm(k, n, rows_per_token=rows) for k, n in sizes]
        cross_gemms.append(Gemm(width, 2 * c, rows_per_token=once))
        # Two layer norms, three residuals, GEGLU (8c to 4c).
        cross = replace(attention, context_tokens=context)
        parameters = sum(g.k * g.n for g in cross_gemms) + 15 * c
        kept = 19 * c * rows + 2 * c * once
        self.add(f"cross-attention {c} x{rows:g}", cross_gemms, parameters, 25 * c * rows, 6, kept, c * rows, cross)

    def resample(self, factor: float) -> None:
        """A convolution at a quarter (down) or four times (up) the positions."""
        c = self.channels
        before = self.rows
        self.rows *= factor
        down = factor < 1
        gemm = self.convolution(c, c, STRIDED_TAPS if down else TAPS)
        # Going up, the enlarged image is written first, and kept.
        kept = c * (before if down else self.rows)
        name = f"{'down' if down else 'up'}sample {c} x{self.rows:g}"
        moved = 0.0 if down else c * (before + self.rows)
        self.add(name, [gemm], gemm.k * gemm.n + c, moved, 0 if down else 1, kept, c * before)
        if down:
            self.skips.append((self.channels, self.rows))


def unet_layers(config: UNetConfig, positions: int, projection: Sequence[Gemm]) -> tuple[Layer, ...]:
    """The layers in the order of a forward, over ``positions`` of the latent; ``projection`` makes context tokens."""
    net = _Builder(config, positions)
    net.embed(projection)
    levels = range(len(config.block_out_channels))
    for level in levels:
        for _ in range(config.layers_per_block):
            net.block(config.block_out_channels[level])
            if level in config.attention_levels:
                net.transformer()
            net.skips.append((net.channels, net.rows))
        if level != levels[-1]:
            net.resample(1 / 4)
    net.block(net.channels)
    net.transformer()
    net.block(net.channels)
    for level in reversed(levels):
        for _ in range(config.layers_per_block + 1):
            net.channels += net.skips.pop()[0]
            net.block(config.block_out_channels[level])
            if level in config.attention_levels:
                net.transformer()
        if level:
            net.resample(4)
    c = net.channels
    head = [net.convolution(c, config.in_channels)]
    net.add("head", head, _parameters(head) + 2 * c, 2 * c, 1, 2 * c, c)
    return tuple(net.layers)


def _parameters(gemms: Sequence[Gemm]) -> int:
    return sum(gemm.k * gemm.n + gemm.n for gemm in gemms)
