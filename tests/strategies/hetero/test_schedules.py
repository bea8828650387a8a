"""Heterogeneous parallelism: three-phase and graph-aware 1F1B schedules by hand."""

from __future__ import annotations

from entrain_bench.program import Pass
from entrain_bench.simulate import place_actions
from entrain_bench.specs.job import Degrees
from support.builders import (
    durations,
    no_delay,
    passes,
)
from support.hetero import pair_layout, program_of

F = Pass.FORWARD


def test_one_llm_stage_runs_microbatches_in_turn_on_lanes_of_both_grids() -> None:
    program = program_of(pair_layout(Degrees(2, 1, 1, 4), Degrees(4, 1, 1, 2), colocated=True), 8, microbatch_size=2)
    for lane in range(4):
        assert passes(program, lane) == [
            *("vision F0", "llm F0", "llm B0", "vision B0"),
            *("vision F1", "llm F1", "llm B1", "vision B1"),
        ]
    assert program.num_lanes[program.forward_actions(0)].ravel().tolist() == [1] * 8
    assert program.num_lanes[program.forward_actions(1)].ravel().tolist() == [2] * 4

    def seconds(member: int, kind: Pass, module: str) -> float:
        # Sample 1 is slow in the encoder; the LLM waits for both its lanes.
        return (5.0 if member == 1 else 1.0) if (module, kind) == ("vision", F) else 2.0

    took = durations(program, lambda view: seconds(view.members[0], view.kind, view.module))
    start, _, _ = place_actions(program, took, no_delay(program))
    # lane 0: V0 . . . . L0 L0 l0 l0 v0 v0 V0 | lane 1 the same, its first V0 lasts 5
    assert start[program.forward_actions(0)].ravel().tolist() == [0, 11, 0, 11, 0, 7, 0, 7]
    assert start[program.forward_actions(1)].ravel().tolist() == [5, 12, 1, 8]
    assert start[program.backward_actions(1)].ravel().tolist() == [7, 14, 3, 10]
    assert start[program.backward_actions(0)].ravel().tolist() == [9, 16, 9, 16, 5, 12, 5, 12]


def test_three_phases_with_fan_in_by_hand() -> None:
    # Encoder TP1 DP2 on the ranks of a two-stage LLM, DP 1; 4 microbatches of 1 sample, 2 in each encoder slice.
    program = program_of(pair_layout(Degrees(1, 1, 1, 2), Degrees(1, 1, 2, 1), colocated=True, num_ranks=2, batch=4), 4)
    assert [program.view(a).members for a in program.forward_actions(0).ravel().tolist()] == [(0, 1), (2, 3)]
    start, _, _ = place_actions(
        program, durations(program, lambda view: 3.0 if view.module == "vision" else 1.0), no_delay(program)
    )
    # rank 0: VVV F0 F1 .  B0 F2 B1 F3 B2 .  B3 vvv     second encoder slice on rank 1, all before the LLM
    # rank 1: VVV .  F0 B0 F1 B1 F2 B2 F3 B3 .  vvv
    assert start[program.forward_actions(0)].ravel().tolist() == [0, 0]
    assert start[program.forward_actions(1)].tolist() == [[3, 4], [4, 6], [7, 8], [9, 10]]
    assert start[program.backward_actions(1)].tolist() == [[6, 5], [8, 7], [10, 9], [12, 11]]
    # The first slice fed microbatches 0 and 1, but rank 0 is busy until 13; the second has its gradients at 13.
    assert start[program.backward_actions(0)].ravel().tolist() == [13, 13]


def test_graph_aware_1f1b_with_two_encoder_replicas_by_hand() -> None:
    # Encoder replicas on ranks 2 and 3 halve each microbatch of 2 for a two-stage LLM on ranks 0 and 1.
    layout = pair_layout(Degrees(1, 1, 1, 2), Degrees(1, 1, 2, 1), colocated=False, num_ranks=4)
    assert [m.ranks.ravel().tolist() for m in layout.modules] == [[2, 3], [0, 1]]
    program = program_of(layout, 6, microbatch_size=2)
    for lane in (2, 3):
        assert passes(program, lane) == [f"vision {p}" for p in ("F0", "F1", "F2", "B0", "B1", "B2")]
    start, _, _ = place_actions(program, durations(program, lambda _: 1.0), no_delay(program))
    # V: F0 F1 F2 .  .  B0 .  B1 .  B2      both encoder replicas
    # 0: .  F0 F1 .  B0 F2 B1 .  B2
    # 1: .  .  F0 B0 F1 B1 F2 B2
    assert start[program.forward_actions(1)].tolist() == [[1, 2], [2, 4], [5, 6]]
    assert start[program.backward_actions(1)].tolist() == [[4, 3], [6, 5], [8, 7]]
    assert start[program.backward_actions(0)].ravel().tolist() == [5, 7, 9] * 2
