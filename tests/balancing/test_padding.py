"""Padded microbatches: samples x longest in work, memory and time; packs stay packed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.chunk_estimates import packed_iteration_s
from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.interleaved import Interleaved
from entrain_bench.balancing.planning import average_layer_s
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.assignment import pad_samples
from entrain_bench.program.layout import Layout
from entrain_bench.records.metrics import measure
from entrain_bench.simulate.executor import Simulator
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.megatron import ArrivalOrder, MegatronPlanner
from entrain_bench_strategies.practice import TokenBudget
from support.builders import GIB, chain_layout, labels, profile_of, random_samples, samples, tiny_job, tiny_model
from support.cli import run

MODEL = tiny_model()
LAYOUT = chain_layout(MODEL, 1, 2, 4, dp=2)
PLAIN = FrameworkOptions()
LONGEST = replace(PLAIN, padding="longest")


def strategy(assigner: ArrivalOrder | TokenBudget) -> Strategy:
    return Strategy("tiny", MegatronPlanner(profile_samples=16), assigner, Interleaved())


def executed(
    shapes: SampleShapes, framework: FrameworkOptions, assigner: ArrivalOrder | TokenBudget | None = None
) -> dict[str, float]:
    """Metrics of a batch, and the strategy's own estimate of its time."""
    job = tiny_job(MODEL, global_batch=16, framework=framework)
    profile = profile_of(job, shapes)
    program = strategy(assigner or ArrivalOrder()).program(shapes, LAYOUT, profile)
    truth = CostTruth(MODEL, job.cluster, framework)
    found = measure(Simulator(truth, 16 * GIB).execute(program), truth)
    trial = {"believed": packed_iteration_s(program, profile), "trial": profile.trial_s(program)}
    return {**found, **trial, "states and activations": float(profile.memory.peak_bytes(program).max())}


def test_lengths_by_hand() -> None:
    # Items hand 10 and 2 tokens to the LLM: lengths 15 and 5 share a microbatch, as do 9 and 3 on the other replica.
    shapes = samples((5, [40]), (5, []), (7, [8]), (3, []))
    dealt = labels([0, 0, 1, 1], [0, 0, 0, 0])
    assert pad_samples(shapes, dealt, 1).llm_tokens.tolist() == [15, 15, 9, 9]
    assert pad_samples(shapes, dealt, 8).llm_tokens.tolist() == [16, 16, 16, 16]
    padded = pad_samples(shapes, dealt, 4)
    assert padded.llm_tokens.tolist() == [16, 16, 12, 12]
    assert padded.take(np.array([3, 0])).llm_tokens.tolist() == [12, 16]
    assert padded.labelled_tokens.tolist() == shapes.labelled_tokens.tolist()
    assert padded.unpadded.llm_tokens.tolist() == [15, 5, 9, 3]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 64]))
def test_a_padded_batch_costs_what_one_of_longer_texts_costs(seed: int, multiple: int) -> None:
    shapes = random_samples(np.random.default_rng(seed), 16)
    job = replace(LONGEST, padding="multiple", pad_to_multiple_of=multiple)
    # By definition: microbatch m of a replica has samples 4 m + 2 r and the next.
    longest = shapes.llm_tokens.reshape(8, 2).max(axis=1).repeat(2)
    longer = replace(shapes, text_tokens=shapes.text_tokens + -(-longest // multiple) * multiple - shapes.llm_tokens)
    padded, texts, packed = executed(shapes, job), executed(longer, PLAIN), executed(shapes, PLAIN)
    charged = ("iteration_time_s", "trial", "believed", "peak_memory_bytes", "states and activations", "core_time_s")
    assert {name: padded[name] for name in charged} == {name: texts[name] for name in charged}
    assert all(padded[name] >= packed[name] for name in charged)
    # Padding is no work that samples need.
    needed = ("cluster_bound_s", "lower_bound_s")
    assert {name: padded[name] for name in needed} == {name: packed[name] for name in needed}
    assert padded["mfu"] * padded["iteration_time_s"] == pytest.approx(packed["mfu"] * packed["iteration_time_s"])
    rate = packed["tokens_per_s"] * packed["iteration_time_s"] / padded["iteration_time_s"]
    assert padded["tokens_per_s"] == pytest.approx(rate)


def test_packs_are_not_padded() -> None:
    shapes = random_samples(np.random.default_rng(0), 16)
    assert executed(shapes, LONGEST, TokenBudget()) == executed(shapes, PLAIN, TokenBudget())


def test_planners_measure_padded_microbatches() -> None:
    # Two samples of 100 and 300 tokens: padded they are two of 300, packed two of 200 on average.
    shapes = samples((100, []), (300, []))
    layers = []
    for framework, lengths in ((LONGEST, [300, 300]), (PLAIN, [200, 200])):
        profile = profile_of(tiny_job(MODEL, framework=framework), shapes)
        found = average_layer_s(profile, shapes, 1, 1)[MODEL.llm_index]
        assert found.tolist() == profile.layers.layer_s(MODEL.llm, np.array(lengths), 1, 1).tolist()
        layers.append(found.sum())
    assert layers[0] > layers[1]


def test_a_wrong_assignment_is_named_before_padding() -> None:
    class Short(ArrivalOrder):
        def assign(self, shapes: SampleShapes, layout: Layout, profile: object) -> object:  # type: ignore[override]
            made = super().assign(shapes, layout, profile)  # type: ignore[arg-type]
            vision, llm = made.modules
            return replace(made, modules=(vision, labels(llm.replica[1:].tolist(), llm.microbatch[1:].tolist())))

    with pytest.raises(Exception, match="assignment of llm: 15 replica and 15 microbatch labels for 16 units"):
        executed(random_samples(np.random.default_rng(0), 16), LONGEST, Short())


def test_training_packs() -> None:
    with pytest.raises(IncompatibleError, match=r"^padding=longest: must be none with harness=train \(llm, cp=1\)"):
        LONGEST.check_executable(MODEL.llm, 1, "train")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("padding=max", "padding=max: unknown; choices: longest, multiple, none"),
        ("pad_to_multiple_of=0", "pad_to_multiple_of=0: must be at least 1"),
    ],
)
def test_bad_values(override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "strategy=megatron", override) == 2
    assert message in capsys.readouterr().err
