"""Metrics against values worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.answers.timelines import memory_steps
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.hosttime import HostTime
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Slots, build_program
from entrain_bench.program.assignment import ModuleAssignment, group_chunks
from entrain_bench.program.layout import Layout
from entrain_bench.program.table import chrome_trace, timeline_frame
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.metrics import forward_std_ms, measure, microbatch_forward
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare, run_experiment
from entrain_bench.simulate import Simulator
from support.builders import chain_layout, placed, samples, tiny_cluster, tiny_model, uniform_batch


@pytest.fixture(scope="module")
def run() -> tuple[object, Timeline]:
    small = ["model=tiny", "cluster=tiny", "global_batch=8", "microbatch_size=2", "layout.tp=1", "layout.dp=2"]
    s = prepare(compose_cells([*small, "strategy=megatron", "workload=opencqa_ocr"])[0].config)
    layout = s.strategy.plan(s.profile)
    shapes = s.source.batch(0, 8, 0)
    assignment = s.strategy.assigner.assign(shapes, layout, s.profile)
    return s, s.executor.execute(s.strategy.scheduler.schedule(shapes, layout, assignment, s.profile))


def test_forward_std_is_over_the_microbatches_of_a_replica(run: tuple[object, Timeline]) -> None:
    _, timeline = run
    program = timeline.program
    chunks = program.chunks[0]
    stages = timeline.end_s[program.forward_actions(0)] - timeline.start_s[program.forward_actions(0)]
    per_replica = []
    for replica in range(2):
        times = [
            sum(
                stages[c].sum() for c in range(len(chunks)) if (chunks.replica[c], chunks.microbatch[c]) == (replica, k)
            )
            for k in range(2)
        ]
        mean = sum(times) / 2
        per_replica.append((sum((t - mean) ** 2 for t in times) / 2) ** 0.5)
    assert microbatch_forward(timeline, [0])[0].tolist() == [0, 0, 1, 1]
    assert forward_std_ms(timeline, [0]) == pytest.approx(1e3 * sum(per_replica) / 2)


def test_forward_std_is_over_the_microbatches_of_a_rank_if_groups_have_several_widths() -> None:
    # Samples 0 and 1 have a rank each, sample 2 both; the fourth is alone on rank 1.
    model, shapes = tiny_model(encoder=0, llm=2), samples((8, []), (8, []), (8, []), (8, []))
    llm = replace(placed(model.llm, np.arange(2).reshape(2, 1, 1)), widths=((1, 1), (1, 2)))
    labels = ModuleAssignment(np.array([0, 1, 2, 1]), np.array([0, 0, 1, 2]))
    chunks = group_chunks(model.llm, shapes, labels)
    slots = Slots(*(chunks.microbatch[:, None].astype(np.int64) + late for late in (0, 3)))
    program = build_program(model, Layout((llm,), 3), shapes, [chunks], [slots])
    seconds, nothing = np.zeros(program.num_actions), np.zeros(program.num_actions)
    took = {0: 1.0, 1: 3.0, 2: 2.0, 3: 7.0}
    for action in program.forward_actions(0).ravel():
        seconds[action] = took[program.view(action).members[0]]
    timeline = Timeline(program, nothing, seconds, nothing, nothing, np.zeros(2))
    assert forward_std_ms(timeline, [0]) == pytest.approx(1e3 * (np.std([1, 2]) + np.std([3, 2, 7])) / 2)
    assert [str(program.view(action)) for action in program.forward_actions(0).ravel()] == [
        "forward of llm microbatch 0 on rank 0, stage 0",
        "forward of llm microbatch 0 on rank 1, stage 0",
        "forward of llm microbatch 2 on rank 1, stage 0",
        "forward of llm microbatch 1 on ranks 0-1 cp2, stage 0",
    ]
    frame = timeline_frame(timeline)
    assert set(frame[frame["microbatch"] == 1]["group"]) == {"ranks 0-1 cp2"}
    assert set(frame[frame["replica"] < 0]["group"]) == {""}
    events = [event for event in chrome_trace(frame)["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0}
    assert {event["args"].get("group") for event in events} == {"rank 0", "rank 1", "ranks 0-1 cp2", None}


@pytest.mark.wide
def test_sub_microbatches_count_as_the_microbatch_that_they_are_parts_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrain_bench_strategies.dip.EFFICIENCY", 0.01)  # an image each
    small = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=4", "layout.tp=1", "layout.dp=2"]
    s = prepare(compose_cells([*small, "strategy=optimus", "workload=opencqa_ocr"])[0].config)
    shapes = s.source.batch(0, 16, 0)
    timeline = s.executor.execute(s.strategy.program(shapes, s.strategy.plan(s.profile), s.profile))
    program = timeline.program
    chunks, actions = program.chunks[0], program.forward_actions(0)
    assert chunks.microbatch.tolist() == 2 * [*range(8)]
    seconds = (timeline.end_s - timeline.start_s)[actions].sum(axis=1)
    replica, forward_s = microbatch_forward(timeline, [0])
    assert replica.tolist() == [0, 0, 1, 1]
    # In order of arrival four images make up a microbatch.
    assert forward_s == pytest.approx(seconds.reshape(4, 4).sum(axis=1))


def test_throughput_flops_and_bubble_follow_from_the_timeline(run: tuple[object, Timeline]) -> None:
    s, timeline = run
    metrics = measure(timeline, s.truth, HostTime())  # type: ignore[attr-defined]
    seconds = timeline.end_s.max()
    shapes = timeline.program.shapes
    flops = 0.0
    for module in s.job.model.modules:  # type: ignore[attr-defined]
        for length in module.lengths(shapes, module.units(shapes)):
            flops += 3 * sum(float(layer.forward_flops(np.array([length]))[0]) for layer in module.layers)
    assert metrics["iteration_time_s"] == pytest.approx(seconds)
    assert metrics["samples_per_s"] == pytest.approx(8 / seconds)
    assert metrics["tokens_per_s"] == pytest.approx(shapes.llm_tokens.sum() / seconds)
    assert metrics["tflops_per_gpu"] == pytest.approx(flops / seconds / 4 / 1e12)
    assert metrics["mfu"] == pytest.approx(flops / seconds / 4 / 149.7e12)
    frame = timeline_frame(timeline)
    busy = ((frame["end_s"] - frame["start_s"]) * frame["num_ranks"]).sum()
    assert metrics["bubble_ratio"] == pytest.approx(1 - busy / (4 * seconds))
    exposed = ((frame["comm_s"] + frame["transfer_wait_s"]) * frame["num_ranks"]).sum() / 4
    assert metrics["exposed_comm_s"] == pytest.approx(exposed)


def test_host_time_is_a_column_of_its_own(run: tuple[object, Timeline]) -> None:
    s, timeline = run
    seconds = timeline.iteration_time_s
    fast = measure(timeline, s.truth, HostTime())  # type: ignore[attr-defined]
    slow = measure(timeline, s.truth, HostTime(seconds + 100, 30))  # type: ignore[attr-defined]
    assert slow == fast | {"assignment_time_s": seconds + 100, "assignment_exposed_s": pytest.approx(70.0)}
    assert fast["assignment_exposed_s"] == 0
    assert fast["iteration_time_s"] == timeline.iteration_time_s


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_over_time_is_what_is_alive_at_each_moment(recompute: bool) -> None:
    model = tiny_model()
    truth = CostTruth(model, tiny_cluster())
    layout = chain_layout(model, 1, 2, 5, dp=2, recompute=recompute)
    shapes, assignment = uniform_batch(model, 5, dp=2)
    program = chain_program(model, shapes, layout, assignment, stages_behind(layout))
    timeline = Simulator(truth, 1e12).execute(program)
    steps = memory_steps(timeline_frame(timeline))
    assert steps.columns.tolist() == ["lane", "rank", "time_s", "bytes"]
    states = truth.memory.lane_state_bytes(layout)
    for lane, rows in steps.groupby("lane"):
        time_s, held = rows["time_s"].to_numpy(), rows["bytes"].to_numpy()
        assert np.all(np.diff(time_s) >= 0)
        assert held.max() == timeline.peak_memory_bytes[lane]
        assert held[-1] == pytest.approx(states[lane], rel=1e-12)
        moments = (time_s[1:] + time_s[:-1])[np.diff(time_s) > 0] / 2
        level = held[np.searchsorted(time_s, moments, side="right") - 1]
        assert level == pytest.approx([states[lane] + alive_bytes(timeline, truth, int(lane), t) for t in moments])


def alive_bytes(timeline: Timeline, truth: CostTruth, lane: int, moment: float) -> float:
    """Activations between the start of their forward and the end of their backward, and what actions need besides.

    And the receive of the action that follows the one that has begun last.
    """
    program, total = timeline.program, 0.0
    handed = truth.memory.transfers(program)
    order = [view.index for view in program.lane(lane)]
    begun = [index for index in order if timeline.start_s[index] < moment]
    if begun and len(begun) < len(order):
        total += handed.received[order[len(begun)]]
    actions = {(view.kind, view.module, view.stage, view.members): view.index for view in program.lane(lane)}
    for (kind, name, stage, members), action in actions.items():
        if kind is not Pass.FORWARD:
            continue
        index = [module.name for module in truth.model.modules].index(name)
        module, place = truth.model.modules[index], program.layout.modules[index]
        kept, working = truth.memory.token_bytes(module, place)
        tokens = module.lengths(program.shapes, np.array(members)).sum()
        back = actions[Pass.BACKWARD, name, stage, members]
        if timeline.start_s[action] < moment < timeline.end_s[back]:
            total += tokens * kept[stage] + handed.held[action]
        for running in (action, back):
            if timeline.start_s[running] < moment < timeline.end_s[running]:
                total += tokens * working[stage] + handed.sent[running]
                total += handed.received[running] if running == back else 0.0
    return total


def test_a_run_records_what_its_strategy_believed_beside_what_came_out() -> None:
    small = ["model=tiny", "cluster=tiny", "global_batch=8", "microbatch_size=2", "layout.tp=1", "layout.dp=2"]
    cells = [[*small, "workload=opencqa_ocr", f"belief_error={error}"] for error in (0, 0.5)]
    exact, wrong = (run_experiment(compose_cells(["strategy=megatron", *each])[0].config) for each in cells)
    for outcome in (exact, wrong):
        each = [row["believed_time_s"] for row in outcome.iterations]
        assert outcome.metrics["believed_time_s"] == pytest.approx(np.mean(each))
    assert exact.metrics["believed_time_s"] == pytest.approx(exact.metrics["iteration_time_s"], rel=0.1)
    assert wrong.metrics["believed_time_s"] != exact.metrics["believed_time_s"]
