"""What the stand-in for SynthChartNet is for: no single chart dominates a replica's microbatches."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.config.compose import compose
from entrain_bench.run.experiment import prepare
from entrain_bench_strategies.entrain.assigner import assign_replicas, effective_microbatches


@pytest.mark.parametrize(("workload", "least", "most"), [("synthchartnet_like", 28, 32), ("opencqa_ocr", 12, 25)])
def test_k_eff_is_near_k_on_the_capped_trace_only(workload: str, least: int, most: int) -> None:
    setting = prepare(compose("strategy=entrain", f"workload={workload}"))
    found = []
    for iteration in range(4):
        shapes = setting.source.batch(iteration, 512, seed=0)
        encoder_s, llm_s = setting.profile.estimates.samples(shapes, 2, 1)
        replica = assign_replicas(np.argsort(-encoder_s, kind="stable"), llm_s, 4)
        found += effective_microbatches(encoder_s[np.argsort(replica, kind="stable").reshape(4, -1)], 32).tolist()
    # Figure 15 of arXiv:2605.27918 shows about 30 microbatches of K = 32.
    assert least <= float(np.mean(found)) <= most
