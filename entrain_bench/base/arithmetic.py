"""Arithmetic with the same bits on every CPU: sums in one order, and IEEE 754 operations alone.

BLAS and LAPACK add in an order that depends on the CPU and the threads; logarithms and sines of NumPy and of the C
library end in other digits where there is FMA or AVX-512. Nothing that decides a simulated result may go through them.
"""

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from entrain_bench.base.arrays import FloatArray

# Relative precision of comparisons of estimates: closer values count as equal, and the earlier one comes first.
DECISIVE_BITS = 30  # 2^-30, about 1e-9
# Terms of the series below; the next one is under 1e-17 of the result.
LOG_TERMS = 20
SINE_TERMS = 14
EXP_TERMS = 20
LN_2 = 0.6931471805599453
# Spreads consecutive numbers over 64 bits: 2^64 over the golden ratio.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def matmul(a: ArrayLike, b: ArrayLike) -> FloatArray:
    """Matrix product ``[..., n]`` by ``[n]`` or ``[n, m]``, summed in the order of the inner dimension."""
    left = np.asarray(a, np.float64)
    right = np.asarray(b, np.float64)
    if not len(right):
        return np.zeros((*left.shape[:-1], *right.shape[1:]))
    terms = left * right if right.ndim == 1 else left[..., None] * right
    return np.asarray(np.add.accumulate(terms, axis=left.ndim - 1).take(-1, axis=left.ndim - 1))


def solve(matrix: FloatArray, right: FloatArray) -> FloatArray:
    """Solution of a positive definite system ``[n, n]`` ``[n]``, by elimination in the order of the rows."""
    rows = np.column_stack([matrix, right]).astype(np.float64)
    for pivot in range(len(rows)):
        below = rows[pivot + 1 :]
        below -= (below[:, pivot] / rows[pivot, pivot])[:, None] * rows[pivot]
    solution = np.zeros(len(rows))
    for pivot in reversed(range(len(rows))):
        known = float(matmul(rows[pivot, pivot + 1 : -1], solution[pivot + 1 :]))
        solution[pivot] = (rows[pivot, -1] - known) / rows[pivot, pivot]
    return solution


def fit_polynomial(points: Iterable[int], values: FloatArray, degree: int) -> FloatArray:
    """Coefficients of the polynomial of least squares, highest power first ``[degree + 1]``; rounded once."""
    powers = [[Fraction(int(x)) ** power for power in range(degree, -1, -1)] for x in points]
    rows = [
        [sum((p[i] * p[j] for p in powers), Fraction()) for j in range(degree + 1)]
        + [sum((p[i] * Fraction(float(y)) for p, y in zip(powers, values, strict=True)), Fraction())]
        for i in range(degree + 1)
    ]
    for pivot, row in enumerate(rows):
        for other in rows:
            if other is not row:
                factor = other[pivot] / row[pivot]
                other[:] = [a - factor * b for a, b in zip(other, row, strict=True)]
    return np.array([float(row[-1] / row[pivot]) for pivot, row in enumerate(rows)])


def log2(values: ArrayLike) -> FloatArray:
    """Binary logarithm of positive numbers, exact for powers of two, else within some 1e-16 of the exponent."""
    mantissa, exponent = np.frexp(np.asarray(values, np.float64))
    # Mantissas from sqrt(1/2) to sqrt(2), so that the series of the inverse hyperbolic tangent converges fast.
    low = mantissa < np.sqrt(0.5)
    mantissa = np.where(low, 2 * mantissa, mantissa)
    exponent = np.where(low, exponent - 1, exponent)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = np.zeros_like(ratio)
    for term in range(LOG_TERMS, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    return np.asarray(exponent + ratio * series * (2.0 / LN_2))


def log(value: float) -> float:
    """Natural logarithm of a positive number."""
    return float(log2(value)) * LN_2


def exp(value: float) -> float:
    """Exponential function of a number within the range of floats, within some 1e-16 of the exponent."""
    # The nearest power of two is taken out; the rest is at most ln(2) / 2, either way.
    power = round(value / LN_2)
    rest = value - power * LN_2
    series = 1.0
    for term in range(EXP_TERMS, 0, -1):
        series = 1.0 + series * rest / term
    return math.ldexp(series, power)


def sine_of_turns(turns: ArrayLike) -> FloatArray:
    """Sine of 2 pi times the given numbers, within some 1e-15."""
    turn = np.asarray(turns, np.float64)
    # The nearest half turn changes the sign; the rest is at most a quarter turn, either way.
    half = np.rint(2 * turn)
    angle = (turn - half / 2) * (2 * np.pi)
    square = angle * angle
    series = np.zeros_like(angle)
    for term in range(SINE_TERMS, 0, -1):
        series = (1.0 + series) * (-square / (2 * term * (2 * term + 1)))
    return np.asarray(np.where(half % 2 == 0, 1.0, -1.0) * angle * (1.0 + series))


def mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return hashed bits of each integer: the last steps of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(bits ^ (bits >> np.uint64(31)))


def uniform(bits: NDArray[np.uint64]) -> FloatArray:
    """Mixed bits as numbers in [0, 1)."""
    return np.asarray((bits >> np.uint64(11)).astype(np.float64) / 2.0**53)


def decisive[Values: (float, FloatArray)](values: Values) -> Values:
    """Return values rounded to ``DECISIVE_BITS`` significant bits, for comparisons that last digits must not decide."""
    if not isinstance(values, np.ndarray):
        # The same operations, a tenth of the time.
        if not math.isfinite(values) or not values:
            return float(values)
        fraction, power = math.frexp(values)
        return math.ldexp(round(fraction * 2.0**DECISIVE_BITS), power - DECISIVE_BITS)
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(mantissa * 2.0**DECISIVE_BITS), exponent - DECISIVE_BITS))
