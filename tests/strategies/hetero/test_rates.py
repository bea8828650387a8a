"""How fast encoders are, as the strategy's page states it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from entrain_bench.costs.loads import loads_of
from entrain_bench.costs.roofline import Roofline
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare

PAGE = (Path(__file__).parents[3] / "docs" / "strategies" / "hetero.md").read_text()
MODELS = ("vit1b_llm7b", "vit3b_llm32b", "vit6b_llm120b", "vit12b_llm120b")
IMAGES, TOKENS = 16, 256


def rate(model: str, tp: int) -> float:
    """TFLOP/s of a GPU in forward and backward, at 6 FLOPs a parameter and token, the projector's time included."""
    (cell,) = compose_cells(["strategy=megatron", f"model={model}", "cluster=h100x64", "workload=uniform_mix"])
    job = prepare(cell.config).job
    encoder = job.model.encoders[0]
    loads = loads_of(encoder, np.full(IMAGES, TOKENS), np.array([0, IMAGES]))
    kinds = [float(times.total_s[0]) for times in Roofline(job.cluster).layers_s(encoder, loads, tp, 1)]
    seconds = sum(kinds[kind] for kind in encoder.layer_kind)
    parameters = sum(layer.parameters for layer in encoder.layers[:-1])
    return 6 * parameters * IMAGES * TOKENS / seconds / tp / 1e12


@pytest.mark.parametrize("tp", [1, 4])
def test_the_page_states_the_rates_of_encoders(tp: int) -> None:
    rates = [round(rate(model, tp)) for model in MODELS]
    # Smaller encoders are slower, and all are where tensor parallelism splits them.
    assert rates == sorted(rates)
    words = " ".join(PAGE.split())
    stated = re.search(r"run at (\d+) TFLOP/s for the 1B encoder, (\d+) for 3B, (\d+) for 6B and (\d+) for 12B", words)
    split = re.search(r"parameter and token\), at (\d+), (\d+), (\d+) and (\d+) at TP 4", words)
    found = stated if tp == 1 else split
    assert found is not None
    assert [int(each) for each in found.groups()] == rates
