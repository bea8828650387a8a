"""Labels, their checks, and the chunks they make."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import chain_chunks
from entrain_bench.base.arrays import offsets_from_counts, rows_of, sum_rows, take_rows
from entrain_bench.base.errors import UserError
from entrain_bench.program.assignment import (
    Assignment,
    ModuleAssignment,
    check_assignment,
    group_chunks,
    same_microbatches,
)
from entrain_bench.specs.shapes import shapes_from_lists
from support.builders import chain_layout, labels, random_samples, rngs, samples, tiny_model

MODEL = tiny_model()
VISION, LLM = MODEL.modules


@settings(max_examples=40, deadline=None)
@given(rngs, st.booleans(), st.booleans())
def test_chunks_are_the_groups_of_equal_labels_in_order(rng: np.random.Generator, encoder: bool, parts: bool) -> None:
    shapes = random_samples(rng, int(rng.integers(1, 12)))
    module = VISION if encoder else LLM
    units = module.units(shapes).tolist()
    replica, microbatch = rng.integers(0, 3, len(units)), rng.integers(0, 5, len(units))
    part = rng.integers(0, 3, len(units)) if parts else None
    chunks = group_chunks(module, shapes, ModuleAssignment(replica, microbatch), part)
    groups: dict[tuple[int, int, int], list[int]] = {}
    for at, unit in enumerate(units):
        key = (int(replica[at]), int(microbatch[at]), int(part[at]) if part is not None else 0)
        groups.setdefault(key, []).append(unit)
    rows = zip(chunks.replica.tolist(), chunks.microbatch.tolist(), chunks.part.tolist(), strict=True)
    assert list(rows) == sorted(groups)
    bounds = zip(chunks.offsets[:-1], chunks.offsets[1:], strict=True)
    assert [chunks.members[lo:hi].tolist() for lo, hi in bounds] == [groups[key] for key in sorted(groups)]
    assert len(chunks) == len(groups)


def test_items_of_a_sample_share_its_labels() -> None:
    shapes = shapes_from_lists(
        ["image", "audio"],
        [(1, [("image", 4, 1), ("audio", 4, 1)]), (1, []), (1, [("audio", 4, 1), ("image", 4, 1), ("image", 4, 1)])],
    )
    model = tiny_model(audio=2)
    assignment = same_microbatches(
        model, shapes, np.array([0, 1, 2]), encoder=np.array([10, 11, 12]), llm=np.array([20, 21, 22])
    )
    vision, audio, llm = assignment.modules
    assert vision.replica.tolist() == [0, 2, 2]
    assert vision.microbatch.tolist() == [10, 12, 12]
    assert audio.replica.tolist() == [0, 2]
    assert audio.microbatch.tolist() == [10, 12]
    assert llm.replica.tolist() == [0, 1, 2]
    assert llm.microbatch.tolist() == [20, 21, 22]


def test_assignments_are_frozen_all_the_way_down() -> None:
    given_labels = labels([0, 0], [0, 1])
    with pytest.raises(FrozenInstanceError):
        given_labels.replica = np.zeros(2, np.int64)  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        given_labels.microbatch[0] = 3


@pytest.mark.parametrize(
    ("replica", "microbatch", "message"),
    [
        ([0, 2, 1], [0, 0, 0], "llm: sample 21 has replica=2: must be 0..1"),
        ([0, 1, -1], [0, 0, 0], "llm: sample 22 has replica=-1: must be 0..1"),
        ([0, 1, 1], [0, -3, 0], "llm: sample 21 has microbatch=-3: must be 0"),
        ([0, 1], [0, 0], "sample 22 has none"),
        ([0, 1, 0, 1], [0, 0, 0, 0], "4 replica and 4 microbatch labels for 3 units"),
        ([0, 1, 0], [0, 0], "3 replica and 2 microbatch labels for 3 units; sample 22"),
    ],
)
def test_bad_labels_of_the_llm_name_the_sample(replica: list[int], microbatch: list[int], message: str) -> None:
    shapes = samples(*[(10, [])] * 30).take(np.array([20, 21, 22]))
    layout = chain_layout(MODEL, 1, 1, 2, dp=2)
    assignment = Assignment((labels([], []), labels(replica, microbatch)))
    with pytest.raises(UserError, match=message.replace("..", r"\.\.")):
        check_assignment(assignment, MODEL, layout, shapes)


@settings(max_examples=30, deadline=None)
@given(rngs)
def test_split_chunks_refine_the_whole_ones_by_the_llm_microbatch(rng: np.random.Generator) -> None:
    shapes = random_samples(rng, 10)
    layout = chain_layout(MODEL, 1, 1, 4, dp=2)
    replica, encoder = rng.integers(0, 2, 10), rng.integers(0, 4, 10)
    llm = encoder + rng.integers(0, 2, 10)
    assignment = same_microbatches(MODEL, shapes, replica, encoder, llm)
    whole, split = (chain_chunks(MODEL, shapes, layout, assignment, cut) for cut in (False, True))
    assert np.array_equal(whole[1].members, split[1].members)
    assert set(whole[0].part) <= {0}
    for chunk in range(len(split[0])):
        members = split[0].members[split[0].offsets[chunk] : split[0].offsets[chunk + 1]]
        owners = shapes.item_sample[members]
        assert set(llm[owners]) == {split[0].part[chunk]}
        assert set(encoder[owners]) == {split[0].microbatch[chunk]}
        assert set(replica[owners]) == {split[0].replica[chunk]}
    pairs = {(int(replica[s]), int(encoder[s]), int(llm[s])) for s in shapes.item_sample}
    assert len(split[0]) == len(pairs)


# CSR helpers


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=6), st.data())
def test_csr_operations_equal_lists(rows: list[list[int]], data: st.DataObject) -> None:
    offsets = offsets_from_counts(np.array([len(row) for row in rows], np.int64))
    values = np.array([value for row in rows for value in row], np.int64)
    assert rows_of(offsets).tolist() == [index for index, row in enumerate(rows) for _ in row]
    assert sum_rows(offsets, values).tolist() == [sum(row) for row in rows]
    if rows:
        chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
        new_offsets, positions = take_rows(offsets, np.array(chosen, np.int64))
        bounds = pairwise(new_offsets)
        assert [values[positions[lo:hi]].tolist() for lo, hi in bounds] == [rows[index] for index in chosen]
