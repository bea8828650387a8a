"""Encoders and LLM in plain torch: one sequence at a time, whole parameters, nothing of megatron-core."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from entrain_bench.specs.module_layers import ModuleConfig


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


@dataclass
class Reference:
    config: ModuleConfig
    name: str
    weights: dict[str, Tensor]

    def get(self, key: str) -> Tensor | None:
        return self.weights.get(f"{self.name}.{key}")

    def linear(self, x: Tensor, key: str) -> Tensor:
        return functional.linear(x, self.weights[f"{self.name}.{key}.weight"], self.get(f"{key}.bias"))

    def norm(self, x: Tensor, key: str) -> Tensor:
        weight = self.weights[f"{self.name}.{key}.weight"]
        epsilon = self.config.norm_epsilon
        if self.config.norm_bias:
            centred = x - x.mean(-1, keepdim=True)
            return centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight + self.get(
                f"{key}.bias"
            )
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight

    def block(self, x: Tensor, index: int, mask: Tensor, angles: Tensor | None) -> Tensor:
        c, at = self.config, f"{index}"
        mixed = self.linear(self.norm(x, f"{at}.input_layernorm"), f"{at}.self_attention.linear_qkv")
        per_group = c.num_heads // c.num_kv_heads
        mixed = mixed.view(len(x), c.num_kv_heads, per_group + 2, c.head_dim)
        q = mixed[:, :, :per_group].reshape(len(x), c.num_heads, c.head_dim)
        k = mixed[:, :, per_group].repeat_interleave(per_group, 1)
        v = mixed[:, :, per_group + 1].repeat_interleave(per_group, 1)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        scores = torch.einsum("qhd,khd->hqk", q, k) / c.head_dim**0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
        x = x + self.linear(attended, f"{at}.self_attention.linear_proj")
        up = self.linear(self.norm(x, f"{at}.pre_mlp_layernorm"), f"{at}.mlp.linear_fc1")
        if c.gated_mlp:
            gate, linear = up.chunk(2, -1)
            active = gate * torch.sigmoid(gate) * linear
        else:
            active = functional.gelu(up)
        return x + self.linear(active, f"{at}.mlp.linear_fc2")

    def vision(self, patches: Tensor, num_outputs: int) -> Tensor:
        length = len(patches)
        x = self.linear(patches, "0.products.products.0")
        places = [patch_place(t, length) for t in range(length)]
        quarter = self.config.head_dim // 4
        frequencies = [self.config.rope_theta ** (-i / quarter) for i in range(quarter)]
        half = torch.tensor([[place * f for place in rc for f in frequencies] for rc in places])
        side = int(self.config.window_tokens**0.5)
        windows = [(row // side, column // side) for row, column in places]
        local = torch.tensor([[one == other for other in windows] for one in windows])
        full = torch.ones(length, length, dtype=torch.bool)
        for index in range(1, self.config.num_layers + 1):
            x = self.block(x, index, full if index - 1 in self.config.full_attention_layers else local, half)
        rows = fit(self.norm(x, f"{self.config.num_layers + 1}.norm"), 4 * num_outputs).view(num_outputs, -1)
        at = f"{self.config.num_layers + 1}.products.products"
        return self.linear(functional.gelu(self.linear(rows, f"{at}.0")), f"{at}.1")

    def audio(self, frames: Tensor, num_outputs: int) -> Tensor:
        length, width = len(frames), self.config.hidden_size
        rows = functional.gelu(self.linear(frames.view(2 * length, -1), "0.products.products.0"))
        weight, bias = (self.weights[f"{self.name}.0.products.products.1.{part}"] for part in ("weight", "bias"))
        # A convolution of width 3 and stride 2; its taps are the outer dimension of the product's k.
        taps = weight.view(width, 3, -1).transpose(1, 2)
        x = functional.gelu(functional.conv1d(rows.T[None], taps, bias, stride=2, padding=1)[0].T)
        scale = torch.exp(-np.log(10000.0) * torch.arange(width // 2) / (width // 2 - 1))
        angles = torch.arange(length)[:, None] * scale
        x = x + torch.cat([angles.sin(), angles.cos()], 1)
        for index in range(1, self.config.num_layers + 1):
            x = self.block(x, index, torch.ones(length, length, dtype=torch.bool), None)
        pairs = fit(self.norm(x, f"{self.config.num_layers + 1}.norm"), 2 * num_outputs).view(num_outputs, 2, -1)
        return self.linear(pairs.mean(1), f"{self.config.num_layers + 1}.products.products.0")

    def llm(self, ids: Tensor, labels: Tensor, projected: Tensor) -> Tensor:
        table = self.weights[f"{self.name}.0.words.weight"]
        given = iter(projected)
        x = torch.stack([next(given) if token < 0 else table[token] for token in ids.tolist()])
        half = self.config.head_dim // 2
        frequencies = torch.tensor([self.config.rope_theta ** (-i / half) for i in range(half)])
        angles = torch.arange(len(ids))[:, None] * frequencies
        mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        for index in range(1, self.config.num_layers + 1):
            x = self.block(x, index, mask, angles)
        last = self.config.num_layers + 1
        head = table if self.config.tied_embeddings else self.weights[f"{self.name}.{last}.logits.weight"]
        logits = self.norm(x, f"{last}.norm") @ head.T
        return functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def patch_place(token: int, length: int) -> tuple[int, int]:
    """Row and column of a patch: blocks of 2 x 2, in rows of ceil(sqrt(number of blocks))."""
    blocks = -(-length // 4)
    wide = next(w for w in range(1, blocks + 1) if w * w >= blocks)
    block_row, block_column = divmod(token // 4, wide)
    row, column = divmod(token % 4, 2)
    return 2 * block_row + row, 2 * block_column + column


def fit(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows[:count], rows.new_zeros(max(0, count - len(rows)), rows.shape[1])])
