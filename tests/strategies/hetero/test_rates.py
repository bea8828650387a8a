"""How fast encoders are: narrow ones are slower, which the strategy's page compares with the paper."""

from __future__ import annotations

import numpy as np

from entrain_bench.costs.loads import compute_loads
from entrain_bench.costs.roofline import Roofline
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare

MODELS = ("vit1b_llm7b", "vit3b_llm32b", "vit6b_llm120b", "vit12b_llm120b")
IMAGES, TOKENS = 16, 256


def rate(model: str, tp: int) -> float:
    """TFLOP/s of a GPU in forward and backward, at 6 FLOPs a parameter and token, the projector's time included."""
    (cell,) = compose_cells(["strategy=megatron", f"model={model}", "cluster=h100x64", "workload=uniform_mix"])
    job = prepare(cell.config).job
    encoder = job.model.encoders[0]
    loads = compute_loads(encoder, np.full(IMAGES, TOKENS), np.array([0, IMAGES]))
    kinds = [float(times.total_s[0]) for times in Roofline(job.cluster).layers_s(encoder, loads, tp, 1)]
    seconds = sum(kinds[kind] for kind in encoder.layer_kind)
    parameters = sum(layer.parameters for layer in encoder.layers[:-1])
    return 6 * parameters * IMAGES * TOKENS / seconds / tp / 1e12


def test_narrow_encoders_are_slower_and_tensor_parallelism_slows_all() -> None:
    whole, split = ([rate(model, tp) for model in MODELS] for tp in (1, 4))
    assert whole == sorted(whole)
    assert all(part < 0.9 * one for part, one in zip(split, whole, strict=True))
