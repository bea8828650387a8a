"""Assigners that learn from executed iterations, in a loop that is not this suite's; and what they know, as values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError, require
from entrain_bench.program.layout import Layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.sampler.planning import Dealt, as_assignment
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes

# Seconds of forward and backward of every microbatch of every rank, for each module ``[ranks, microbatches, 2]``.
type Timings = Mapping[str, Sequence[Sequence[Sequence[float]]]]


@dataclass(frozen=True, slots=True)
class Lessons:
    """A strategy at every iteration, over epochs: from each of ``first``, rising from 0, on as in ``strategies``."""

    first: tuple[int, ...]
    strategies: tuple[Strategy, ...]

    def at(self, iteration: int) -> Strategy:
        """The strategy that assigns an iteration."""
        return self.strategies[self._place(iteration)]

    def _place(self, iteration: int) -> int:
        return max(0, bisect_right(self.first, iteration) - 1)

    def since(self, iteration: int) -> list[list[Any]]:
        """Return the assigners of this and later iterations as plain values ``[first, values of the assigner]``."""
        start = self._place(iteration)
        rows = zip(self.first[start:], self.strategies[start:], strict=True)
        return [[first, values_of(strategy.assigner)] for first, strategy in rows]

    def restored(self, rows: Sequence[Sequence[Any]]) -> Lessons:
        """The lessons that ``since`` wrote; ``UserError`` if they are of another assigner."""
        base = self.strategies[0]
        known = [replace(base, assigner=with_values(base.assigner, values, "assigner")) for _, values in rows]
        return Lessons(tuple(int(first) for first, _ in rows), tuple(known))


def executed(model: ModelSpec, shapes: SampleShapes, layout: Layout, dealt: Dealt, timings: Timings) -> Timeline:
    """The timeline of an iteration of a loop that holds the whole model on every rank: measured actions, all from 0 s.

    Raises:
        UserError: for a layout with several stages, and for timings that are not those of the microbatches.
    """
    if any(placed.pp > 1 for placed in layout.modules) or len({placed.dp for placed in layout.modules}) > 1:
        raise UserError("observe: layout: must have one stage and one DP, because a rank times whole microbatches")
    names = [module.name for module in model.modules]
    require(sorted(timings) == sorted(names), "observe: timings of", sorted(timings), f"of {sorted(names)}")
    assignment = as_assignment(dealt, model, shapes)
    program = chain_program(model, shapes, layout, assignment, stages_behind(layout, model.llm_index))
    end_s = np.zeros(program.num_actions)
    for index, name in enumerate(names):
        seconds = _checked(name, timings[name], dealt)
        chunks = program.chunks[index]
        for actions, column in ((program.forward_actions(index), 0), (program.backward_actions(index), 1)):
            places = zip(chunks.replica.tolist(), chunks.microbatch.tolist(), strict=True)
            end_s[actions[:, 0]] = [seconds[replica][place, column] for replica, place in places]
    nothing = np.zeros(program.num_actions)
    return Timeline(program, nothing, end_s, nothing, nothing, np.zeros(layout.num_lanes))


def _checked(name: str, rows: Sequence[Sequence[Sequence[float]]], dealt: Dealt) -> list[FloatArray]:
    """Seconds of a module ``[microbatches, 2]`` for every rank."""
    require(len(rows) == len(dealt), f"observe: {name}: ranks", len(rows), f"all {len(dealt)}")
    arrays = []
    for rank, (row, microbatches) in enumerate(zip(rows, dealt, strict=True)):
        array = np.asarray(row, np.float64)
        where = f"observe: {name}: rank {rank}"
        shape = (len(microbatches), 2)
        require(array.shape == shape, f"{where}: shape", array.shape, f"{shape}, forward and backward of a microbatch")
        require(bool(np.all(np.isfinite(array) & (array >= 0))), where, array.tolist(), "seconds of at least 0")
        arrays.append(array)
    return arrays


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
    if isinstance(part, np.generic | np.ndarray):
        return part.tolist()
    plain = "To be saved, it must be made of dataclasses and plain values"
    raise UserError(f"strategy.assigner: holds a {type(part).__name__}. {plain}")


def with_values(part: Any, values: Any, where: str) -> Any:
    """A part with the fields that ``values_of`` wrote; ``UserError`` if of another class."""
    if is_dataclass(part) and not isinstance(part, type):
        known = [f.name for f in fields(part) if f.init]
        fits = isinstance(values, Mapping) and sorted(values) == sorted(["is", *known])
        if not fits or values["is"] != type(part).__name__:
            found = values.get("is", "") if isinstance(values, Mapping) else ""
            raise UserError(f"state: {where}={found}: must be {type(part).__name__}, as in this sampler")
        new = {name: with_values(getattr(part, name), values[name], f"{where}.{name}") for name in known}
        return replace(part, **new)
    if part is None and isinstance(values, Mapping) and "is" in values:
        raise UserError(f"state: {where}={values['is']}: must be null, as in this sampler")
    if isinstance(part, np.ndarray):
        return np.asarray(values, part.dtype)
    return tuple(map(_tuples, values)) if isinstance(part, tuple) else values


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
