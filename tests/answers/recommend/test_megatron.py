"""What Megatron-LM runs as it is: layouts and programs by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrain_bench.answers.recommend.megatron import layout_reasons, program_reasons, takes_arrivals
from entrain_bench.balancing.interleaved import interleaved_program
from entrain_bench.balancing.lpt import arrival_places
from entrain_bench.balancing.schedules import chain_program, stages_behind, three_phase_program
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.job import Job
from entrain_bench.specs.shapes import SampleShapes
from support.builders import random_samples, samples, tiny_cluster, tiny_job, tiny_model

MODEL, TEXT = tiny_model(encoder=3, llm=8), tiny_model(encoder=0, llm=8)
TP, PP, DP, BATCH, SIZE = 2, 4, 2, 16, 2
STOCK = FrameworkOptions(encoder_sp=False, encoder_cp=False)


def job_of(framework: FrameworkOptions = STOCK, text: bool = False, **more: Any) -> Job:
    model = TEXT if text else MODEL
    cluster = tiny_cluster(2, 8)
    return tiny_job(model, cluster, global_batch=BATCH, microbatch_size=SIZE, framework=framework, **more)


def layout_of(layers: tuple[int, ...] = (2, 3, 3, 2), turns: int = 1, text: bool = False, **changes: Any) -> Layout:
    """The encoder on the LLM's first stage, replicas on consecutive ranks; changes are of ``<module>_<field>``."""
    ranks = np.arange(DP * PP * TP).reshape(DP, PP, TP)
    llm = ModuleLayout("llm", TP, 1, layers, np.concatenate([ranks] * turns, axis=1))
    vision = ModuleLayout("vision", TP, 1, (5,), ranks[:, :1])
    modules = [
        replace(module, **{k.partition("_")[2]: v for k, v in changes.items() if k.startswith(f"{module.module}_")})
        for module in ([llm] if text else [vision, llm])
    ]
    return Layout(tuple(modules), BATCH // SIZE // DP)


FIRST = np.arange(DP * PP * TP).reshape(DP, PP, TP)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": (1, 3, 3, 3)}, "stages of 0/3/3/2 layers; those between the first and the last must have as many"),
        ({"layers": (2, 2, 3, 3)}, "stages of 1/2/3/2 layers"),
        ({"vision_ranks": FIRST[:, 1:2]}, "vision is not whole on the first stage of llm"),
        ({"vision_ranks": FIRST[:, :2], "vision_layers_per_stage": (2, 3)}, "vision is not whole on the first stage"),
        ({"vision_ranks": FIRST[:1, :1]}, "vision has TP 2, CP 1, DP 1 of its own"),
        ({"vision_tp": 1, "vision_cp": 2}, "vision has TP 1, CP 2, DP 2 of its own"),
        ({"vision_recompute": True}, "vision recomputes alone"),
        ({"vision_offload": True}, "vision is offloaded"),
        (
            {"llm_ranks": FIRST[:, ::-1], "vision_ranks": FIRST[:, -1:]},
            "replicas are not on consecutive ranks, their stages in order",
        ),
    ],
)
def test_layouts_that_it_cannot_take(changes: dict[str, Any], says: str) -> None:
    assert next(layout_reasons(job_of(), layout_of(**changes))).startswith(says)


@pytest.mark.parametrize(
    ("framework", "says"),
    [
        (replace(STOCK, p2p="overlapped"), "1F1B waits for its transfers (p2p=overlapped)"),
        (replace(STOCK, tp_overlap=0.5), "tp_overlap=0.5 is no flag"),
        (replace(STOCK, recompute_granularity="selective"), ""),
        (replace(STOCK, encoder_optimizers=2), "encoders have one copy of optimizer states (encoder_optimizers=2)"),
    ],
)
def test_settings_that_it_does_not_have(framework: FrameworkOptions, says: str) -> None:
    assert next(layout_reasons(job_of(framework), layout_of()), "") == says


def batch() -> SampleShapes:
    return random_samples(np.random.default_rng(0), BATCH)


def assigned(shapes: SampleShapes, shift: int = 0, encoder: int = 0) -> Assignment:
    """Arrival order; samples shifted, encoder microbatches in another order."""
    replica, microbatch = arrival_places(BATCH, SIZE, DP)
    replica, microbatch = np.roll(replica, shift), np.roll(microbatch, shift)
    return same_microbatches(MODEL, shapes, replica, microbatch ^ encoder, microbatch)


def one_f_one_b(assignment: Assignment, shapes: SampleShapes, extra: int = 0, split: bool = False) -> Program:
    layout = layout_of()
    warmup = [each + extra for each in stages_behind(layout, 1)]
    delay = [np.zeros_like(each) for each in warmup] if split else None
    return chain_program(MODEL, shapes, layout, assignment, warmup, weight_delay=delay)


def test_programs_that_it_runs() -> None:
    shapes = batch()
    for shift in (0, 3):
        program = one_f_one_b(assigned(shapes, shift), shapes)
        assert next(program_reasons(job_of(), program), "") == ""
        assert takes_arrivals(job_of(), program) == (shift == 0)


def test_an_interleaved_program_of_a_text_model_is_its_order() -> None:
    shapes = samples(*[(10 + index, []) for index in range(BATCH)])
    replica, microbatch = arrival_places(BATCH, SIZE, DP)
    assignment = same_microbatches(TEXT, shapes, replica, microbatch, microbatch)
    layout = layout_of((2, 1, 1, 1, 1, 1, 1, 2), turns=2, text=True)
    assert next(program_reasons(job_of(text=True), interleaved_program(TEXT, shapes, layout, assignment)), "") == ""


def test_programs_that_it_does_not_run() -> None:
    shapes, job = batch(), job_of()
    replica, microbatch = arrival_places(BATCH, SIZE, DP)
    uneven = same_microbatches(MODEL, shapes, replica, np.minimum(microbatch, 2), np.minimum(microbatch, 2))
    found = {
        "uneven": next(program_reasons(job, one_f_one_b(uneven, shapes))),
        "apart": next(program_reasons(job, one_f_one_b(assigned(shapes, encoder=1), shapes))),
        "warm": next(program_reasons(job, one_f_one_b(assigned(shapes), shapes, extra=1))),
        "split": next(program_reasons(job, one_f_one_b(assigned(shapes), shapes, split=True))),
        "phases": next(program_reasons(job, three_phase_program(MODEL, shapes, layout_of(), assigned(shapes)))),
    }
    assert found == {
        "uneven": "its microbatches have 2 to 4 samples instead of 2",
        "apart": "vision and llm do not share microbatches",
        "warm": "its order is not 1F1B",
        "split": "its backwards are split",
        "phases": "its order is not 1F1B",
    }


def test_experts_decide_the_order_of_ranks() -> None:
    model = tiny_model(encoder=3, llm=8, experts={"count": 8, "top_k": 2, "ffn_hidden_size": 32})
    job = replace(job_of(), model=model)
    by_stage = np.arange(DP * PP * TP).reshape(PP, DP, TP).swapaxes(0, 1)

    def spread(ranks: np.ndarray) -> Layout:
        return layout_of(vision_ranks=ranks[:, :1], llm_ranks=ranks, llm_ep=2)

    # Replicas of a stage are neighbors, as in Megatron-LM's usual order.
    assert next(layout_reasons(job, spread(by_stage)), "") == ""
    assert next(layout_reasons(job, spread(FIRST))).startswith("its expert-parallel groups are of consecutive ranks")
