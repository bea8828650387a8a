"""Assigners that learn from iterations of other training loops, and their state as plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import UserError, require
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.sampler.padding import Dealt
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes

# Seconds of forward and backward of every microbatch of every rank, for each module ``[ranks, microbatches, 2]``.
type Timings = Mapping[str, Sequence[Sequence[Sequence[float]]]]


def executed(model: ModelSpec, shapes: SampleShapes, layout: Layout, dealt: Dealt, timings: Timings) -> Timeline:
    """The timeline of an iteration of a loop that holds the whole model on every rank: measured actions, all from 0 s.

    ``UserError`` for a layout with several stages, and for timings that are not those of the microbatches.
    """
    if any(placed.pp > 1 for placed in layout.modules) or len({placed.dp for placed in layout.modules}) > 1:
        raise UserError("observe: layout: must have one stage and one DP, because a rank times whole microbatches")
    names = [module.name for module in model.modules]
    require(sorted(timings) == sorted(names), "observe: timings of", sorted(timings), f"of {sorted(names)}")
    replica, place = np.empty((2, len(shapes)), np.int64)
    for rank, microbatches in enumerate(dealt):
        for index, positions in enumerate(microbatches):
            replica[list(positions)] = rank
            place[list(positions)] = index
    assignment = same_microbatches(model, shapes, replica, place, place)
    program = chain_program(model, shapes, layout, assignment, stages_behind(layout, model.llm_index))
    end_s = np.zeros(program.num_actions)
    for index, name in enumerate(names):
        rows = timings[name]
        require(len(rows) == len(dealt), f"observe: {name}: ranks", len(rows), f"all {len(dealt)}")
        seconds = np.zeros((len(dealt), max(map(len, dealt)), 2))
        for rank, row in enumerate(rows):
            measured = np.asarray(row, np.float64)
            count = len(dealt[rank])
            fits = measured.shape == (count, 2) and bool(np.all(np.isfinite(measured) & (measured >= 0)))
            allowed = f"forward and backward seconds [{count}, 2] of at least 0"
            require(fits, f"observe: {name}: rank {rank}", measured.tolist(), allowed)
            seconds[rank, :count] = measured
        chunks = program.chunks[index]
        for column, actions in enumerate((program.forward_actions(index), program.backward_actions(index))):
            end_s[actions[:, 0]] = seconds[chunks.replica, chunks.microbatch, column]
    nothing = np.zeros(program.num_actions)
    return Timeline(program, nothing, end_s, nothing, nothing, np.zeros(layout.num_lanes))


def values_of(part: Any) -> Any:
    """A part's fields as values that ``torch.load`` reads by default; ``UserError`` for a part with others."""
    if part is None or isinstance(part, bool | int | float | str):
        return part
    if is_dataclass(part):
        return {"is": type(part).__name__, **{f.name: values_of(getattr(part, f.name)) for f in fields(part) if f.init}}
    if isinstance(part, Mapping):
        return {key: values_of(value) for key, value in part.items()}
    if isinstance(part, tuple | list):
        return [values_of(value) for value in part]
    plain = "To be saved, it must be made of dataclasses and plain values"
    raise UserError(f"strategy.assigner: holds a {type(part).__name__}. {plain}")


def with_values(part: Any, values: Any, where: str) -> Any:
    """A part with the fields that ``values_of`` wrote; ``UserError`` if of another class."""
    saved = values.get("is") if isinstance(values, Mapping) else None
    wanted = type(part).__name__ if is_dataclass(part) else None
    require(saved == wanted, f"state: {where}", saved, f"{wanted}, as in this sampler")
    if wanted:
        known = [f.name for f in fields(part) if f.init]
        require({*known} <= {*values}, f"state: {where}", sorted(values), f"all of {known}")
        return replace(
            part, **{name: with_values(getattr(part, name), values[name], f"{where}.{name}") for name in known}
        )
    return _tuples(values) if isinstance(part, tuple) else values


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
