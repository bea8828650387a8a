"""Valid ranges of a record's numbers; a value outside is not a result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isfinite

TIME = "iteration_time_s"
# Least values of metrics that may be below 0; of a training run a loss, too, and both may be infinite or not a number.
LEAST = {"gap_to_lower_bound": -1.0, "bubble_ratio": -1.0, "loss": -inf, "grad_norm": -inf}
# Shares are differences of sums.
ROUNDING = 1e-9


def check_numbers(metrics: Mapping[str, object]) -> None:
    """Raise ``ValueError`` naming the first metric that cannot be."""
    for name, value in metrics.items():
        least = LEAST.get(name, 0.0)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is not a number")
        if least > -inf and not (isfinite(value) and value >= least - ROUNDING):
            raise ValueError(f"{name}={value!r} must be finite and at least {least:g}")


def check_results(metrics: Mapping[str, object], iterations: Iterable[Mapping[str, object]]) -> None:
    """The same for the means and the iterations of a run with a result."""
    for each in (metrics, *iterations):
        check_numbers(each)
    if not metrics.get(TIME):
        raise ValueError(f"{TIME}={metrics.get(TIME)!r} must be above 0")
