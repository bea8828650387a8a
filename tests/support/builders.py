"""Builders of tiny models, clusters, jobs, layouts and programs, and a slow reference executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from entrain_bench.balancing.interface import Planner, Strategy
from entrain_bench.balancing.interleaved import Interleaved
from entrain_bench.balancing.profile import Profile, create_profile
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import ActionView, Pass, Program, Slots, build_program
from entrain_bench.program.assignment import Assignment, ModuleAssignment, group_chunks, same_microbatches
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.simulate import place_actions
from entrain_bench.specs.cluster import ClusterSpec, DeviceSpec, LinkTier
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.job import Job, LayoutRequest
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes, shapes_from_lists
from entrain_bench_strategies.entrain import EntrainAssigner, EntrainScheduler
from entrain_bench_strategies.megatron import ArrivalOrder, MegatronPlanner

TOKENS = {
    "patch_pixels": 14,
    "merge_patches": 2,
    "min_image_tokens": 4,
    "temporal_patch_frames": 2,
    "video_frames_per_s": 2.0,
    "audio_frames_per_s": 50.0,
    "audio_merge_frames": 2,
    "audio_segment_s": 30.0,
    "text_chars_per_token": 4.0,
}
GIB = 2**30
# Efficiencies that do not depend on size.
UNLIMITED: dict[str, Any] = {
    "sustained_fraction": 1.0,
    "gemm_half_flops": 0.0,
    "attention_half_tokens": 0.0,
    "attention_half_head_dim": 0.0,
}
FRAMEWORK = FrameworkOptions()
rngs = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def llm_config(blocks: int = 2, **changes: Any) -> dict[str, Any]:
    config = {
        "role": "llm",
        "num_layers": blocks,
        "hidden_size": 128,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 16,
        "ffn_hidden_size": 256,
        "gated_mlp": True,
        "vocab_size": 1000,
        "context_tokens": 1 << 20,
        "source": "made up",
    }
    return config | changes


def encoder_config(blocks: int = 2, modality: str = "image", **changes: Any) -> dict[str, Any]:
    config = {
        "role": "encoder",
        "modalities": [modality],
        "num_layers": blocks,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "ffn_hidden_size": 128,
        "gated_mlp": False,
        "embed_gemms": [{"k": 96, "n": 64}],
        "head_gemms": [{"k": 256, "n": 128, "rows_per_token": 0.25}],
        "source": "made up",
    }
    return config | changes


def generating_model() -> ModelSpec:
    modules = {
        "vision": encoder_config(),
        "llm": llm_config(),
        "out": encoder_config(role="generator", item_tokens=64),
    }
    return ModelSpec.from_config({"name": "handmade", "modules": modules, "tokens": TOKENS})


def tiny_model(encoder: int = 2, llm: int = 2, audio: int = 0, **llm_changes: Any) -> ModelSpec:
    """A model with the given numbers of blocks; 0 leaves an encoder out. Every module has two layers more."""
    modules = {}
    if encoder:
        modules["vision"] = encoder_config(encoder)
    if audio:
        modules["audio"] = encoder_config(audio, "audio")
    modules["llm"] = llm_config(llm, **llm_changes)
    return ModelSpec.from_config({"name": "handmade", "modules": modules, "tokens": TOKENS})


def tiny_cluster(
    num_nodes: int = 1, gpus_per_node: int = 8, memory_bytes: int = 16 * GIB, launch_s: float = 1e-6
) -> ClusterSpec:
    """Round numbers: an effective 1e12 FLOP/s and 1e9 bytes/s of memory; pairs, nodes, a network, a host link."""
    device = DeviceSpec("handmade", 2e12, memory_bytes, 2e9, 0.5, 0.25, 0.2, 0.5, launch_s, 1e8, **UNLIMITED)
    tiers = (
        LinkTier("pair", min(2, gpus_per_node), 1e9, 1e-6),
        LinkTier("node", gpus_per_node, 5e8, 2e-6),
        LinkTier("network", num_nodes * gpus_per_node, 1e8, 1e-5),
    )
    return ClusterSpec("handmade", num_nodes, gpus_per_node, device, tiers)


def tiny_job(
    model: ModelSpec,
    cluster: ClusterSpec | None = None,
    *,
    global_batch: int = 32,
    microbatch_size: int = 2,
    request: LayoutRequest | None = None,
    budget_bytes: float = 16 * GIB,
    framework: FrameworkOptions = FRAMEWORK,
) -> Job:
    asked = request or LayoutRequest()
    return Job(model, cluster or tiny_cluster(), global_batch, microbatch_size, asked, budget_bytes, framework)


def samples(*rows: tuple[int, Sequence[int]], modality: str = "image") -> SampleShapes:
    """Samples ``(text_tokens, encoder tokens of each item)``; an item hands a quarter of its tokens to the LLM."""
    listed = [(text, [(modality, tokens, max(1, tokens // 4)) for tokens in items]) for text, items in rows]
    return shapes_from_lists([modality], listed)


def random_samples(rng: np.random.Generator, count: int, longest: int = 512, max_items: int = 3) -> SampleShapes:
    rows = []
    for _ in range(count):
        items = rng.integers(1, longest, rng.integers(0, max_items + 1)).tolist()
        rows.append((int(rng.integers(1, longest)), items))
    return samples(*rows)


@dataclass(frozen=True)
class ListSource:
    """Draws with replacement from fixed samples; the training stream repeats them in order."""

    shapes: SampleShapes

    def batch(self, iteration: int, num_samples: int, seed: int) -> SampleShapes:
        first = iteration * num_samples + seed
        return self.shapes.take((first + np.arange(num_samples)) % len(self.shapes))

    def draw(self, num_samples: int, rng: np.random.Generator) -> SampleShapes:
        return self.shapes.take(rng.integers(0, len(self.shapes), num_samples))


@dataclass(frozen=True)
class PlainPrograms:
    """The ``MakeProgram`` of a function, without a draft; a decorator."""

    make: Callable[[SampleShapes, Layout], Program]
    chooses_recomputation: bool = False
    chooses_microbatches: bool = False

    @property
    def draft(self) -> PlainPrograms:
        return self

    def __call__(self, shapes: SampleShapes, layout: Layout) -> Program:
        return self.make(shapes, layout)


def profile_of(
    job: Job, shapes: SampleShapes, seed: int = 0, belief_error: float = 0.0, belief_bias: float = 0.0
) -> Profile:
    truth = CostTruth(job.model, job.cluster, job.framework)
    return create_profile(job, truth, ListSource(shapes), seed, belief_error, belief_bias)


def even(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def placed(module: ModuleSpec, ranks: Any, tp: int = 1, cp: int = 1, recompute: bool = False) -> ModuleLayout:
    """A module on the given ranks ``[dp, pp, tp * cp]``, its layers spread evenly."""
    array = np.array(ranks)
    return ModuleLayout(module.name, tp, cp, even(len(module.layers), array.shape[1]), array, recompute)


def chain_layout(
    model: ModelSpec, encoder_stages: int, llm_stages: int, num_microbatches: int, dp: int = 1, recompute: bool = False
) -> Layout:
    """One rank a stage: encoder stages (shared by all encoders), then LLM stages, replica after replica."""
    stages = encoder_stages + llm_stages
    ranks = np.arange(dp * stages).reshape(dp, stages, 1)
    modules = []
    for module in model.modules:
        held = ranks[:, :encoder_stages] if module.is_encoder else ranks[:, encoder_stages:]
        modules.append(placed(module, held, recompute=recompute))
    return Layout(tuple(modules), num_microbatches)


def uniform_batch(model: ModelSpec, num_microbatches: int, dp: int = 1) -> tuple[SampleShapes, Assignment]:
    shapes = samples(*[(10, [40] if model.encoders else [])] * (num_microbatches * dp))
    microbatch = np.arange(len(shapes)) // dp
    return shapes, same_microbatches(model, shapes, np.arange(len(shapes)) % dp, microbatch, microbatch)


def two_ranks(model: ModelSpec, num_microbatches: int) -> Program:
    """1F1B with an encoder stage on rank 0 and an LLM stage on rank 1."""
    layout = chain_layout(model, 1, 1, num_microbatches)
    shapes, assignment = uniform_batch(model, num_microbatches)
    return chain_program(model, shapes, layout, assignment, stages_behind(layout))


def labels(replica: Sequence[int], microbatch: Sequence[int]) -> ModuleAssignment:
    return ModuleAssignment(np.array(replica, np.int64), np.array(microbatch, np.int64))


AV_MODEL = tiny_model(encoder=2, llm=2, audio=3)


def av_samples(rng: np.random.Generator, count: int) -> SampleShapes:
    """Images and audio segments mixed; items hand over any number of tokens."""
    rows = []
    for _ in range(count):
        kinds = rng.choice(["image", "audio"], int(rng.integers(0, 4))).tolist()
        rows.append(
            (int(rng.integers(1, 50)), [(kind, int(rng.integers(1, 90)), int(rng.integers(1, 30))) for kind in kinds])
        )
    return shapes_from_lists(["image", "audio"], rows)


def random_av_program(rng: np.random.Generator) -> Program:
    """Random samples of AV_MODEL in random chunks and slots; its order need not be feasible."""
    vision, audio, llm = AV_MODEL.modules
    layout = Layout(
        (
            placed(vision, [[[0], [1]], [[2], [3]]]),
            placed(audio, [[[0]], [[2]], [[3]]]),
            placed(llm, [[[4], [5], [6]], [[7], [8], [9]]]),
        ),
        3,
    )
    shapes = av_samples(rng, int(rng.integers(1, 10)))
    chunks, slots = [], []
    for module, place in zip(AV_MODEL.modules, layout.modules, strict=True):
        units = len(module.units(shapes))
        given_labels = ModuleAssignment(rng.integers(0, place.dp, units), rng.integers(0, 3, units))
        rows = group_chunks(module, shapes, given_labels, rng.integers(0, 2, units))
        chunks.append(rows)
        shape = (len(rows), place.pp)
        weight = rng.integers(0, 9, shape) if rng.integers(2) else None
        slots.append(Slots(rng.integers(0, 9, shape), rng.integers(0, 9, shape), weight))
    return build_program(AV_MODEL, layout, shapes, chunks, slots)


def durations(program: Program, seconds: Callable[[ActionView], float]) -> FloatArray:
    """Duration of every action by a function of its view; steps take no time."""
    steps = (Pass.GRAD_SYNC, Pass.OPTIMIZER)
    views = [program.view(action) for action in range(program.num_actions)]
    return np.array([0.0 if view.kind in steps else seconds(view) for view in views])


def passes(program: Program, lane: int) -> list[str]:
    """Order of a lane as ``vision F0.1``: module, pass, microbatch, and part where it is not 0."""
    names = {Pass.FORWARD: "F", Pass.BACKWARD: "B", Pass.WEIGHT: "W"}
    return [
        f"{view.module} {names[view.kind]}{view.microbatch}" + (f".{view.part}" if view.part else "")
        for view in program.lane(lane)
        if view.kind in names
    ]


def find(program: Program, module: str, kind: Pass, stage: int, members: Iterable[int], replica: int = 0) -> int:
    wanted = (module, kind, stage, replica, tuple(sorted(members)))
    views = map(program.view, range(program.num_actions))
    found = [v.index for v in views if (v.module, v.kind, v.stage, v.replica, tuple(sorted(v.members))) == wanted]
    assert len(found) == 1, f"{wanted}: {len(found)} actions"
    return found[0]


class StuckError(Exception):
    """The reference executor cannot go on; ``heads`` holds the next action of every unfinished lane."""

    def __init__(self, heads: dict[int, int], done: set[int]) -> None:
        super().__init__("stuck")
        self.heads = heads
        self.done = done


def reference_times(
    program: Program, duration_s: Sequence[float] | FloatArray, delay_s: Sequence[float] | FloatArray
) -> tuple[list[float], list[float], list[float]]:
    """Start, end and transfer wait of every action, from the definition and in plain Python.

    An action starts when all its lanes have finished what stands before it and all its inputs have arrived.
    """
    orders = [
        [int(a) for a in program.lane_actions[lo:hi]]
        for lo, hi in zip(program.lane_offsets[:-1], program.lane_offsets[1:], strict=True)
    ]
    lanes_of: dict[int, list[int]] = {}
    for lane, order in enumerate(orders):
        for action in order:
            lanes_of.setdefault(action, []).append(lane)
    next_index = [0] * len(orders)
    free = [0.0] * len(orders)
    nan = float("nan")
    start, end, wait = ([nan] * program.num_actions for _ in range(3))
    done: set[int] = set()
    total = len(lanes_of)
    while len(done) < total:
        heads = {
            lane: order[at] for lane, (order, at) in enumerate(zip(orders, next_index, strict=True)) if at < len(order)
        }
        progressed = False
        for action in sorted(set(heads.values())):
            lanes = lanes_of[action]
            edges = range(int(program.dep_offsets[action]), int(program.dep_offsets[action + 1]))
            if any(heads.get(lane) != action for lane in lanes):
                continue
            if any(int(program.dep_actions[edge]) not in done for edge in edges):
                continue
            computed = max(free[lane] for lane in lanes)
            begin = computed
            for edge in edges:
                finished = end[int(program.dep_actions[edge])]
                computed = max(computed, finished)
                begin = max(begin, finished + float(delay_s[edge]))
            start[action], end[action], wait[action] = begin, begin + float(duration_s[action]), begin - computed
            done.add(action)
            for lane in lanes:
                free[lane] = end[action]
                next_index[lane] += 1
            progressed = True
        if not progressed:
            raise StuckError(heads, done)
    return start, end, wait


def uniform_times(program: Program, forward: float, backward: float) -> tuple[FloatArray, FloatArray]:
    """Start and end if every forward and every backward takes the same, without delays."""
    seconds = durations(program, lambda view: forward if view.kind is Pass.FORWARD else backward)
    start, end, _ = place_actions(program, seconds, no_delay(program))
    return start, end


def no_delay(program: Program) -> FloatArray:
    return np.zeros(len(program.dep_actions))


def makespan(program: Program, end: FloatArray) -> float:
    return float(end[program.chunk >= 0].max())


def as_ints(values: Iterable[int]) -> IntArray:
    return np.array(list(values), np.int64)


def plan_with(planner: Planner, profile: Profile) -> Layout:
    """The layout a planner chooses beside the other parts of its system."""
    if isinstance(planner, MegatronPlanner):
        return Strategy("megatron", planner, ArrivalOrder(), Interleaved()).plan(profile)
    return Strategy("entrain", planner, EntrainAssigner(), EntrainScheduler()).plan(profile)
