"""State and activation bytes worked by hand; peaks against a replay of every lane."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.arrays import rows_of
from entrain_bench.costs.memory import Memory
from entrain_bench.program import Pass, Program, Slots, build_program
from entrain_bench.program.assignment import Assignment, ModuleAssignment, group_chunks
from entrain_bench.program.layout import Layout
from entrain_bench.specs.framework import FrameworkOptions, with_options
from entrain_bench.specs.job import Degrees
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from support.builders import (
    chain_layout,
    placed,
    random_samples,
    tiny_cluster,
    tiny_model,
    uniform_batch,
)
from support.hetero import MODEL as HETERO
from support.hetero import pair_layout, program_of

MODEL = tiny_model(encoder=2, llm=4)
VISION, LLM = MODEL.modules
TIED = tiny_model(encoder=2, llm=4, tied_embeddings=True)
# A block of the LLM: h = 128, q = 128, kv = 64, ffn = 256 gated; two norms.
BLOCK = 128 * 256 + 128 * 128 + 128 * 512 + 256 * 128 + 2 * 128
EMBEDDING = 1000 * 128
HEAD = 1000 * 128 + 128


@pytest.mark.parametrize(
    ("distributed", "bytes_a_parameter"),
    # bf16 weight, fp32 gradient; fp32 weight and two moments, the last three over DP x CP = 4 ranks
    [(False, 2 + 4 + 12), (True, 2 + 4 + 12 / 4)],
)
def test_states_of_a_stage_by_hand(distributed: bool, bytes_a_parameter: float) -> None:
    # 6 layers on 2 stages, TP 2, CP 2, DP 2.
    place = placed(LLM, np.arange(16).reshape(2, 2, 4), tp=2, cp=2)
    state = Memory(MODEL, FrameworkOptions(distributed)).stage_state_bytes(LLM, place)
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


def test_activation_bytes_of_a_token_by_hand() -> None:
    # Kept by a block: 4 h of norms, 2 q, 2 kv, the gated MLP's 512 + 256; bf16. The head: its norm and fp32 logits.
    # And by attention a number for each of 8 heads.
    block = 2 * (4 * 128 + 2 * 128 + 2 * 64 + 512 + 256) + 4 * 8
    head = 2 * 2 * 128 + 4 * 1000
    place = placed(LLM, [[[0, 1], [2, 3]]], tp=2)
    kept, working = Memory(MODEL).token_bytes(LLM, place)
    assert kept == pytest.approx([2 * block / 2, (2 * block + head) / 2], rel=1e-12)
    # Gradients around the MLP's activation, or bf16 logits; and the hidden states gathered from both ranks.
    around, logits, gathered = 2 * (512 + 256) / 2, 2 * 1000 / 2, 2 * 128
    assert working == pytest.approx([around + gathered, logits + gathered], rel=1e-12)
    again = placed(LLM, [[[0, 1], [2, 3]]], tp=2, recompute=True)
    kept, working = Memory(MODEL).token_bytes(LLM, again)
    # Of blocks inputs alone are kept; one block's activations exist while it runs.
    assert kept == pytest.approx([2 * 256 / 2, (2 * 256 + head) / 2], rel=1e-12)
    assert working == pytest.approx([around + gathered + block / 2] * 2, rel=1e-12)


def test_bytes_of_a_token_between_the_passes_of_a_split_backward_by_hand() -> None:
    # Of a block's products inputs h, q, h, ffn and gradients of outputs q + 2 kv, h, 2 ffn, h: hidden states whole, the
    # rest divided. Of the head h and the logits; an embedding has no product.
    whole, divided = 4 * 128, (128 + 2 * 64) + 128 + 512 + 256
    for tp, ranks in ((1, [[[0], [1]]]), (2, [[[0, 1], [2, 3]]])):
        place = placed(LLM, ranks, tp=tp)
        for framework in (FrameworkOptions(), FrameworkOptions(sequence_parallel=False)):
            left = Memory(MODEL, framework).weight_token_bytes(LLM, place)
            block = 2 * (whole + divided / tp)
            assert left == pytest.approx([2 * block, 2 * block + 2 * (128 + 1000 / tp)], rel=1e-12)
    kept, _ = Memory(MODEL).token_bytes(LLM, placed(LLM, [[[0], [1]]]))
    # Without tensor parallelism as much as is kept for backward, but for attention's sums.
    assert Memory(MODEL).weight_token_bytes(LLM, placed(LLM, [[[0], [1]]]))[0] == kept[0] - 2 * 4 * 8
    frozen = replace(LLM, layers=tuple(layer.frozen(True) for layer in LLM.layers))
    assert not Memory(MODEL).weight_token_bytes(frozen, placed(LLM, [[[0], [1]]])).any()


def test_an_fp32_model_has_larger_activations_and_no_copy_of_its_weights() -> None:
    half, full = (Memory(MODEL, element_bytes=size) for size in (2, 4))
    assert [float(memory.parameter_bytes(2)) for memory in (half, full)] == [2 + 4 + 12 / 2, 4 + 4 + 8 / 2]
    bf16 = FrameworkOptions(grad_dtype="bf16")
    assert [float(Memory(MODEL, bf16, size).parameter_bytes(2)) for size in (2, 4)] == [2 + 2 + 12 / 2, 4 + 4 + 8 / 2]
    place = placed(LLM, [[[0]]])
    fp32 = 4 * 4 * 8 + 4 * 1000
    kept, double = (float(memory.token_bytes(LLM, place)[0][0]) for memory in (half, full))
    assert double == pytest.approx(2 * (kept - fp32) + fp32, rel=1e-12)


def handed_bytes(program: Program) -> tuple[list[float], list[float], list[float]]:
    """Bytes that every action receives and sends, and that a forward has from another module, by hand."""
    received, sent, held = ([0.0] * program.num_actions for _ in range(3))
    layout = program.layout
    for target in range(program.num_actions):
        for edge in range(program.dep_offsets[target], program.dep_offsets[target + 1]):
            source = int(program.dep_actions[edge])
            placed, size = layout.modules[program.module[target]], float(program.dep_bytes[edge])
            ends = [
                {*layout.modules[program.module[a]].ranks[program.replica[a], program.stage[a]].tolist()}
                for a in (source, target)
            ]
            if program.module[source] == program.module[target]:
                size /= placed.tp * placed.cp
            elif program.kind[target] == Pass.FORWARD:
                held[target] += size
            if ends[0] != ends[1]:
                received[target] += size
                sent[source] += size
    return received, sent, held


def replayed_peaks(program: Program, model: ModelSpec, distributed: bool) -> list[float]:
    """Highest memory of a rank of every lane, from single actions in order."""
    memory = Memory(model, FrameworkOptions(distributed))
    received, sent, given = handed_bytes(program)
    columns = list(zip(program.module.tolist(), program.chunk.tolist(), program.stage.tolist(), strict=True))
    given_to = {columns[action]: given[action] for action in np.flatnonzero(program.kind == Pass.FORWARD).tolist()}
    peaks = []
    for lane in range(program.layout.num_lanes):
        state = 0.0
        for module, place in zip(model.modules, program.layout.modules, strict=True):
            rank = int(program.layout.lane_first_rank[lane])
            for stage in range(place.pp):
                if rank in place.ranks[:, stage]:
                    state += float(memory.stage_state_bytes(module, place)[stage])
        held, peak = 0.0, state
        views = [view for view in program.lane(lane) if view.members]
        for view, following in zip_longest(views, views[1:]):
            ahead = sent[view.index] + (received[following.index] if following else 0.0)
            module, place = model.module(view.module), program.layout.module(view.module)
            tokens = int(module.lengths(program.shapes, np.array(view.members)).sum())
            kept, working = (tokens * per_token[view.stage] for per_token in memory.token_bytes(module, place))
            if view.kind is Pass.FORWARD:
                held += kept + given[view.index]
                peak = max(peak, state + held + working + ahead)
                continue
            left = 0.0
            if program.splits_backward(model.modules.index(module)):
                left = tokens * float(memory.weight_token_bytes(module, place)[view.stage])
            if view.kind is Pass.WEIGHT:
                peak = max(peak, state + held + ahead)
                held -= left
            else:
                after = held - kept - given_to[columns[view.index]] + left
                peak = max(peak, state + max(held, after) + working + ahead + received[view.index])
                held = after
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
        backward = forward + rng.integers(0, 6, shape)
        slots.append(Slots(forward, backward, backward + rng.integers(0, 3, shape) if rng.integers(2) else None))
    program = build_program(MODEL, layout, shapes, chunks, slots)
    memory = Memory(MODEL, FrameworkOptions(distributed))
    assert memory.peak_bytes(program) == pytest.approx(replayed_peaks(program, MODEL, distributed), rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "kept", "working"),
    # bytes of a logit on each of two ranks: the fp32 softmax and the bf16 logits or their gradient; the bf16 logits,
    # over which their gradient is written; gathered logits with an fp32 copy and logarithms, and the gradients of both
    [("unfused", 4 / 2, 2 / 2), ("fused", 2 / 2, 0), ("eager", 2 + 4 + 4, 4 + 4)],
)
def test_bytes_of_a_loss_by_hand(kind: str, kept: float, working: float) -> None:
    model = with_options(MODEL, FrameworkOptions(cross_entropy=kind))
    memory, place = Memory(model), placed(model.llm, [[[0, 1], [2, 3]]], tp=2)
    found, extra = (each[-1] for each in memory.layer_bytes(model.llm, place))
    gathered, norm = 2 * 128, 2 * 2 * 128 / 2
    assert (found, extra) == pytest.approx((norm + kept * 1000, gathered + working * 1000), rel=1e-12)


@given(reserve=st.floats(0, 1))
@settings(deadline=None, max_examples=20)
def test_the_reserve_is_on_all_that_comes_and_goes(reserve: float) -> None:
    layout = chain_layout(MODEL, 1, 3, 4)
    program = chain_program(MODEL, *uniform_batch_of(4, layout), stages_behind(layout))
    plain, more = Memory(MODEL), Memory(MODEL, device=replace(tiny_cluster(4, 4).device, allocator_reserve=reserve))
    states = plain.lane_state_bytes(layout)
    assert more.lane_state_bytes(layout).tolist() == states.tolist()
    lanes = rows_of(program.lane_offsets)
    tensors, held = (memory.over_program(program) - states[lanes] for memory in (plain, more))
    assert held == pytest.approx((1 + reserve) * tensors, rel=1e-9, abs=1e-3)


@pytest.mark.parametrize(("recompute", "kept", "working"), [(False, 1, 2), (True, 0, 3)])
def test_unfused_attention_keeps_a_matrix_of_every_head(recompute: bool, kept: int, working: int) -> None:
    layout = chain_layout(MODEL, 1, 3, 2, recompute=recompute)
    program = chain_program(MODEL, *uniform_batch_of(2, layout), stages_behind(layout))
    frameworks = FrameworkOptions(), FrameworkOptions(attention_kernel="unfused")
    plain, scores = (Memory(MODEL, framework).action_bytes(program) for framework in frameworks)
    # 20 tokens are padded to tiles of 128 x 64; the LLM has 8 heads, in bf16. Its stages have 1, 2 and 1 blocks.
    matrix, forward = 2 * 8 * 128 * 64, program.forward_actions(1)
    blocks = np.array([1, 2, 1])
    assert [layer.kind for layer in LLM.layers] == ["embed", *["block"] * 4, "head"]
    assert layout.modules[1].layers_per_stage == (2, 2, 2)
    assert (scores[0] - plain[0])[forward].tolist() == (matrix * kept * np.stack([blocks] * 2)).tolist()
    assert (scores[1] - plain[1])[forward].tolist() == (matrix * working * np.ones((2, 3))).tolist()


def uniform_batch_of(num_microbatches: int, layout: Layout) -> tuple[SampleShapes, Layout, Assignment]:
    shapes, assignment = uniform_batch(MODEL, num_microbatches)
    return shapes, layout, assignment


@pytest.mark.parametrize(
    ("framework", "each"),
    # an fp32 copy of a bf16 gradient, over two replicas that share
    [
        (FrameworkOptions(), 0.0),
        (FrameworkOptions(grad_dtype="bf16"), 4 / 2),
        (FrameworkOptions(distributed_optimizer=False, grad_dtype="bf16"), 4.0),
    ],
)
def test_what_an_optimizer_step_needs_by_hand(framework: FrameworkOptions, each: float) -> None:
    place = placed(LLM, np.arange(4).reshape(2, 2, 1))
    parameters = [EMBEDDING + 2 * BLOCK, 2 * BLOCK + HEAD]
    assert Memory(MODEL, framework).optimizer_bytes(LLM, place).tolist() == [each * own for own in parameters]


def test_a_step_is_the_peak_where_activations_are_small() -> None:
    layout = chain_layout(MODEL, 1, 3, 1)
    program = chain_program(MODEL, *uniform_batch_of(1, layout), stages_behind(layout))
    memory = Memory(MODEL, FrameworkOptions(grad_dtype="bf16"))
    states, llm = memory.lane_state_bytes(layout), layout.modules[1]
    assert memory.peak_bytes(program)[1:].tolist() == (states[1:] + memory.optimizer_bytes(LLM, llm)).tolist()


# Encoder TP1 DP2 on the two ranks of a two-stage LLM.
LAYOUT = pair_layout(Degrees(1, 1, 1, 2), Degrees(1, 1, 2, 1), colocated=True, num_ranks=2, batch=4)
PARAMETERS = MODEL.modules[0].parameters


def offloaded(layout: Layout) -> Layout:
    vision, llm = layout.modules
    return replace(layout, modules=(replace(vision, offload=True), llm))


def test_weights_and_gradients_are_away_while_the_llm_runs() -> None:
    plain, away = program_of(LAYOUT, 4), program_of(offloaded(LAYOUT), 4)
    memory = Memory(HETERO)
    released = memory.over_program(plain)[0] - memory.over_program(away)[0]
    for lane in range(2):
        first, last = plain.lane_offsets[lane : lane + 2]
        # vision F, 4 forwards and 4 backwards of the LLM, vision B, and two steps of two modules
        views = plain.lane(lane)
        assert [view.module for view in views[:10]] == ["vision", *["llm"] * 8, "vision"]
        # bf16 weights and fp32 gradients
        expected = [0.0, *[6.0 * PARAMETERS] * 8, *[0.0] * (len(views) - 9)]
        assert released[first:last] == pytest.approx(expected, abs=1e-3)


def test_a_padded_vocabulary_takes_memory_by_hand() -> None:
    # 1,001 words on TP 4 are padded to 1,024: bf16 weight, fp32 gradient, three fp32 states over DP = 2 ranks.
    model = tiny_model(llm=4, vocab_size=1001)
    words = (1024 - 1000) * 128
    place = placed(model.llm, np.arange(16).reshape(2, 2, 4), tp=4)
    state = Memory(model, FrameworkOptions(distributed_optimizer=True)).stage_state_bytes(model.llm, place)
    parameters = [EMBEDDING + words + 2 * BLOCK, 2 * BLOCK + HEAD + words]
    assert state == pytest.approx([p / 4 * (2 + 4 + 12 / 2) for p in parameters], rel=1e-12)
