"""Iteration time of the baseline and the four systems on five traces, one seed: the main figure in a minute.

Corresponds to arXiv:2605.27918, Figure 11, as ``iteration_time`` does; cells of ``experiments/figure/quick.yaml``.
"""

from entrain_bench.figures.iteration_time import draw, load

__all__ = ["EXPERIMENT", "RUNS", "draw", "load"]

EXPERIMENT = "quick"
RUNS = True
