"""Iteration time in Entrain's setting (TP 2, CP 1, DP 4, microbatches of 4), relative to the fastest strategy.

Corresponds to arXiv:2605.27918, Figure 11; cells of ``experiments/figure/entrain_setting.yaml``, drawn as
``iteration_time`` is.
"""

from entrain_bench.figures.iteration_time import draw, load

__all__ = ["EXPERIMENT", "RUNS", "draw", "load"]

EXPERIMENT = "entrain_setting"
RUNS = True
