"""State and activation bytes worked by hand; peaks against a replay of every lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.costs.memory import Memory
from entrain_bench.program import Pass, Program, Slots, build_program
from entrain_bench.program.assignment import ModuleAssignment, group_chunks, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.framework import Framework
from entrain_bench.specs.model import ModelSpec
from entrain_bench.strategy.schedules import chain_program, stages_behind
from support.builders import (
    chain_layout,
    even,
    placed,
    random_samples,
    samples,
    tiny_model,
    uniform_batch,
)

MODEL = tiny_model(encoder=2, llm=4)
VISION, LLM = MODEL.modules
TIED = tiny_model(encoder=2, llm=4, tied_embeddings=True)
# A block of the LLM: h = 128, q = 128, kv = 64, ffn = 256 gated; two norms.
BLOCK = 128 * 256 + 128 * 128 + 128 * 512 + 256 * 128 + 2 * 128
EMBEDDING = 1000 * 128
HEAD = 1000 * 128 + 128


def test_an_odd_number_of_parameters_is_shared_evenly() -> None:
    llm = tiny_model(encoder=0, hidden_size=125).llm
    assert llm.parameters % 2 == 1
    # Two replicas of TP 2 share the optimizer's states: 6 bytes a parameter and 12 by 2.
    state = Memory(MODEL).stage_state_bytes(llm, placed(llm, [[[0, 1]], [[2, 3]]], tp=2))
    assert state.tolist() == [llm.parameters / 2 * (6 + 12 / 2)]


def test_parameters_of_the_layers_by_hand() -> None:
    assert [layer.parameters for layer in LLM.layers] == [EMBEDDING, *[BLOCK] * 4, HEAD]


@pytest.mark.parametrize(
    ("distributed", "bytes_a_parameter"),
    # bf16 weight, fp32 gradient; fp32 weight and two moments, the last three over DP x CP = 4 ranks
    [(False, 2 + 4 + 12), (True, 2 + 4 + 12 / 4)],
)
def test_states_of_a_stage_by_hand(distributed: bool, bytes_a_parameter: float) -> None:
    # 6 layers on 2 stages, TP 2, CP 2, DP 2.
    place = placed(LLM, np.arange(16).reshape(2, 2, 4), tp=2, cp=2)
    state = Memory(MODEL, Framework(distributed)).stage_state_bytes(LLM, place)
    parameters = [EMBEDDING + 2 * BLOCK, 2 * BLOCK + HEAD]
    assert state == pytest.approx([p / 2 * bytes_a_parameter for p in parameters], rel=1e-12)


def test_a_tied_embedding_is_one_tensor_on_one_stage_and_two_on_two() -> None:
    memory = Memory(TIED)
    one, two = (memory.stage_parameters(TIED.llm, placed(TIED.llm, np.arange(pp).reshape(1, pp, 1))) for pp in (1, 2))
    assert one.tolist() == [4 * BLOCK + HEAD]
    assert two.tolist() == [EMBEDDING + 2 * BLOCK, 2 * BLOCK + HEAD]
    assert one.sum() == TIED.llm.parameters
    untied = Memory(MODEL).stage_parameters(LLM, placed(LLM, [[[0]]]))
    assert untied.tolist() == [EMBEDDING + 4 * BLOCK + HEAD]


def test_modules_on_the_same_rank_add_their_states() -> None:
    layout = Layout((placed(VISION, [[[0]], [[1]]]), placed(LLM, [[[0, 1], [2, 3]]], tp=2)), 1)
    memory = Memory(MODEL)
    vision = memory.stage_state_bytes(VISION, layout.modules[0])[0]
    first, second = memory.stage_state_bytes(LLM, layout.modules[1])
    # Lanes: rank 0, rank 1, ranks 2 and 3; figures are for one rank.
    assert memory.lane_state_bytes(layout) == pytest.approx([vision + first, vision + first, second], rel=1e-12)


def test_activation_bytes_of_a_token_by_hand() -> None:
    # Kept by a block: 4 h of norms, 2 q, 2 kv, the gated MLP's 512 + 256; bf16. The head: its norm and fp32 logits.
    block = 2 * (4 * 128 + 2 * 128 + 2 * 64 + 512 + 256)
    head = 2 * 2 * 128 + 4 * 1000
    place = placed(LLM, [[[0, 1], [2, 3]]], tp=2)
    kept, working = Memory(MODEL).token_bytes(LLM, place)
    assert kept == pytest.approx([2 * block / 2, (2 * block + head) / 2], rel=1e-12)
    assert working.tolist() == [0.0, 0.0]
    again = placed(LLM, [[[0, 1], [2, 3]]], tp=2, recompute=True)
    kept, working = Memory(MODEL).token_bytes(LLM, again)
    # Inputs alone are kept (none for the embedding's token numbers); the largest layer's activations exist in backward.
    assert kept == pytest.approx([2 * 256 / 2, (2 * 256 + 256) / 2], rel=1e-12)
    assert working == pytest.approx([block / 2, head / 2], rel=1e-12)


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_1f1b_stage_holds_as_many_microbatches_as_stages_follow_and_one(
    num_microbatches: int, recompute: bool
) -> None:
    layout = chain_layout(MODEL, 1, 3, num_microbatches, recompute=recompute)
    shapes, assignment = uniform_batch(MODEL, num_microbatches)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    memory = Memory(MODEL)
    expected: list[float] = []
    for module, place, tokens in ((VISION, layout.modules[0], 40), (LLM, layout.modules[1], 20)):
        state = memory.stage_state_bytes(module, place)
        kept, working = memory.token_bytes(module, place)
        for stage in range(place.pp):
            held = min(num_microbatches, 4 - len(expected))
            expected.append(state[stage] + tokens * (held * kept[stage] + working[stage]))
    assert memory.peak_bytes(program) == pytest.approx(expected, rel=1e-12)


def replayed_peaks(program: Program, model: ModelSpec, distributed: bool) -> list[float]:
    """Highest memory of a rank of every lane, from single actions in order."""
    memory = Memory(model, Framework(distributed))
    peaks = []
    for lane in range(program.layout.num_lanes):
        state = 0.0
        for module, place in zip(model.modules, program.layout.modules, strict=True):
            rank = int(program.layout.lane_first_rank[lane])
            for stage in range(place.pp):
                if rank in place.ranks[:, stage]:
                    state += float(memory.stage_state_bytes(module, place)[stage])
        held, peak = 0.0, state
        for view in program.lane(lane):
            if view.kind not in (Pass.FORWARD, Pass.BACKWARD):
                continue
            module, place = model.module(view.module), program.layout.module(view.module)
            tokens = int(module.lengths(program.shapes, np.array(view.members)).sum())
            kept, working = (tokens * per_token[view.stage] for per_token in memory.token_bytes(module, place))
            if view.kind is Pass.FORWARD:
                held += kept
                peak = max(peak, state + held)
            else:
                peak = max(peak, state + held + working)
                held -= kept
        assert abs(held) < 1e-3
        peaks.append(peak)
    return peaks


LAYOUTS = [
    ([[[0]], [[1]]], [[[0, 1]]], 2),
    ([[[0, 1]]], [[[2], [3]], [[4], [5]]], 1),
    ([[[0], [1]]], [[[0], [1]]], 1),
]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(LAYOUTS), st.booleans(), st.booleans(), st.booleans())
def test_peaks_equal_a_replay_of_every_lane(
    seed: int, ranks: tuple[Any, Any, int], encoder: bool, llm: bool, distributed: bool
) -> None:
    rng = np.random.default_rng(seed)
    tp = np.shape(ranks[0])[2]
    layout = Layout((placed(VISION, ranks[0], tp, 1, encoder), placed(LLM, ranks[1], ranks[2], 1, llm)), 1)
    shapes = random_samples(rng, 6)
    chunks, slots = [], []
    for module, place in zip(MODEL.modules, layout.modules, strict=True):
        units = len(module.units(shapes))
        chunks.append(
            group_chunks(module, shapes, ModuleAssignment(rng.integers(0, place.dp, units), rng.integers(0, 4, units)))
        )
        shape = (len(chunks[-1]), place.pp)
        forward = rng.integers(0, 6, shape)
        slots.append(Slots(forward, forward + rng.integers(0, 6, shape)))
    program = build_program(MODEL, layout, shapes, chunks, slots)
    memory = Memory(MODEL, Framework(distributed))
    assert memory.peak_bytes(program) == pytest.approx(replayed_peaks(program, MODEL, distributed), rel=1e-9)


def test_split_backward_frees_the_kept_part_earlier() -> None:
    layout = chain_layout(MODEL, 1, 1, 8)
    shapes = samples(*[(10, [400])] * 16)
    encoder = np.arange(16) // 2
    # The second sample of every even microbatch is deferred to the next.
    llm = encoder + ((np.arange(16) % 2 == 1) & (encoder % 2 == 0))
    assignment = same_microbatches(MODEL, shapes, np.zeros(16, np.int64), encoder, llm)
    whole, split = (
        chain_program(MODEL, shapes, layout, assignment, stages_behind(layout), cut) for cut in (False, True)
    )
    memory = Memory(MODEL)
    assert memory.peak_bytes(split)[0] < memory.peak_bytes(whole)[0]
    kept = memory.token_bytes(VISION, layout.modules[0])[0][0]
    # Warm-up of one microbatch: the unsplit chunk and its partner are held when the next arrives.
    assert memory.peak_bytes(whole)[0] - memory.peak_bytes(split)[0] == pytest.approx(400 * kept, rel=1e-9)


def test_layers_spread_evenly() -> None:
    assert [even(7, stages) for stages in (1, 2, 3)] == [(7,), (4, 3), (3, 2, 2)]
