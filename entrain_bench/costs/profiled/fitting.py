"""Seconds as a sum of two parts, each proportional to something: latency and bandwidth, a step and its parameters."""

from __future__ import annotations

from collections.abc import Sequence


def fit_two(first: Sequence[float], second: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Factors a, b >= 0 for which ``a first + b second`` has the least squares of relative residuals.

    Args:
        first: what a is multiplied with, at each point.
        second: likewise b; not all 0.
        seconds: at each point, positive.
    """
    left = [value / time for value, time in zip(first, seconds, strict=True)]
    right = [value / time for value, time in zip(second, seconds, strict=True)]
    aa, bb = sum(x * x for x in left), sum(y * y for y in right)
    ab, a1, b1 = sum(x * y for x, y in zip(left, right, strict=True)), sum(left), sum(right)
    determinant = aa * bb - ab * ab
    # Points that are multiples of each other leave a free: none of it.
    a = (a1 * bb - b1 * ab) / determinant if determinant > 1e-12 * aa * bb else 0.0
    if a <= 0:
        return 0.0, b1 / bb
    b = (b1 * aa - a1 * ab) / determinant
    return (a, b) if b > 0 else (a1 / aa, 0.0)
