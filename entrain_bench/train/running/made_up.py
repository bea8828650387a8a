"""Made-up features, expanded from the keys of their rows where they are needed; the same bits on every device.

A number follows from its row's key and its column by integer arithmetic alone, which wraps around at 32 bits on CPUs
and GPUs alike. So the host hands over eight bytes a row, and a row is the same whatever chunk, rank or device it is on.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

# Multipliers of a mixing function of 32 bits with little bias ("lowbias32", C. Wellons, Prospecting for Hash Functions,
# 2018), as signed numbers.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32
# A step through 32 bits that visits all of them: 2^32 over the golden ratio, odd.
_STEP = 0x9E3779B9 - 2**32
_UPPER_16, _UPPER_17 = 0xFFFF, 0x1FFFF
# Odd numbers of 24 bits and a sign, exact in float32 and symmetric, scaled to a variance of 1.
_NUM_BITS = 24
_SCALE = sqrt(3) / 2 ** (_NUM_BITS - 1)
# Numbers that a CPU makes at a time, for its caches.
_NUM_ON_CPU = 2**17


def made_up_features(keys: Tensor, width: int) -> Tensor:
    """Independent uniform float32 of mean 0, variance 1 ``[rows, width]`` for keys ``[rows, 2]``, on their device."""
    device = keys.device
    columns = _columns(width, device)
    features = torch.empty(len(keys), width, device=device)
    at_once = max(1, _NUM_ON_CPU // width if device.type == "cpu" else len(keys))
    for some, rows in zip(torch.split(keys, at_once), torch.split(features, at_once), strict=True):
        _fill(rows, some, columns)
    return features


def _columns(width: int, device: torch.device) -> Tensor:
    """A word for each column ``[width]``."""
    words = torch.arange(width, dtype=torch.int32, device=device) * _STEP
    for multiplier in (_FIRST, _SECOND):
        words = (words ^ ((words >> 16) & _UPPER_16)) * multiplier
    return words ^ ((words >> 16) & _UPPER_16)


def _fill(features: Tensor, keys: Tensor, columns: Tensor) -> None:
    """Make rows ``[rows, width]`` out of their keys; shifts bring in zeros, where torch's bring in the sign."""
    words, shifted = torch.add(keys[:, :1], columns), features.view(torch.int32)
    torch.bitwise_right_shift(words, 16, out=shifted).bitwise_and_(_UPPER_16)
    words.bitwise_xor_(shifted).mul_(_FIRST).bitwise_xor_(keys[:, 1:])
    torch.bitwise_right_shift(words, 15, out=shifted).bitwise_and_(_UPPER_17)
    words.bitwise_xor_(shifted).mul_(_SECOND)
    # The upper bits depend on all others; with their lowest set they are odd, so that none is the mean.
    words.bitwise_right_shift_(32 - _NUM_BITS).bitwise_or_(1)
    features.copy_(words).mul_(_SCALE)
