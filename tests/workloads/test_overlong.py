"""Samples longer than a model's context: refused with their row, shortened, or left out; and every one is counted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.base.errors import UserError
from entrain_bench.specs.shapes import SampleShapes, shapes_from_lists
from entrain_bench.specs.tokens import TokenRules
from entrain_bench.specs.workload import ListedShapes
from entrain_bench_workloads.trace import OnOverlong, TraceWorkload, fitting, truncated

# An LLM token is 28 pixels square; images have 4 of them at least.
RULES = TokenRules(14, 2, 4, 2, 2.0, 50.0, 2, 30.0, 4.0, context_tokens=10)
CONTEXT = 10


def image(tokens: int) -> tuple[str, int, int]:
    return "image", 4 * tokens, tokens


def parts(shapes: SampleShapes) -> list[tuple[int, list[int]]]:
    """Text and LLM tokens of the items of every sample."""
    ends = zip(shapes.item_offsets[:-1], shapes.item_offsets[1:], strict=True)
    items = [shapes.item_llm_tokens[low:high].tolist() for low, high in ends]
    return list(zip(shapes.text_tokens.tolist(), items, strict=True))


@pytest.mark.parametrize(
    ("text", "items", "left"),
    [
        (4, [6], (4, [6])),  # fits to the token
        (9, [6], (4, [6])),  # text alone is enough
        (1, [10], (0, [10])),  # all of the text is enough
        (3, [6, 5], (3, [6])),  # the last item has to go, and leaves room for the text
        (9, [6, 5, 1], (4, [6])),  # what comes after it goes as well, though it were small enough
        (12, [], (10, [])),
        (2, [11], (2, [])),  # no item fits
        (0, [11, 3], None),  # nothing is left
    ],
)
def test_text_goes_first_then_items_from_the_last(
    text: int, items: list[int], left: tuple[int, list[int]] | None
) -> None:
    # Neighbours that fit stay as they are.
    shapes = shapes_from_lists(["image"], [(1, [image(2)]), (text, [*map(image, items)]), (7, [])])
    expected = [(1, [2]), *([left] if left else []), (7, [])]
    assert parts(truncated(shapes, CONTEXT)) == expected


SIZES = st.lists(
    st.tuples(st.integers(0, 25), st.lists(st.integers(1, 25), max_size=4)).filter(lambda row: row[0] or row[1]),
    min_size=1,
    max_size=12,
)


@pytest.mark.wide
@given(SIZES, st.integers(1, 30), st.booleans())
def test_every_sample_fits_nothing_is_cut_without_need_and_all_are_counted(
    rows: list[tuple[int, list[int]]], context: int, named: bool
) -> None:
    shapes = shapes_from_lists(["image"], [(text, [*map(image, items)]) for text, items in rows])
    if named:
        shapes = replace(shapes, sample_names=np.array([f"s{row}" for row in range(len(rows))], np.object_))
    source = ListedShapes("mine", shapes)
    shorter, fewer = (fitting(source, context, policy) for policy in (OnOverlong.TRUNCATE, OnOverlong.DROP))
    short = [row for row, (text, items) in enumerate(rows) if text + sum(items) <= context]
    assert parts(fewer.shapes) == [rows[row] for row in short]
    assert fewer.counts == {"listed": len(short), "truncated": 0, "dropped": len(rows) - len(short)}
    for place, row in enumerate(shorter.shapes.sample_ids):
        (text, items), (cut_text, cut_items) = rows[row], parts(shorter.shapes)[place]
        length = cut_text + sum(cut_items)
        assert 0 < length <= context
        assert cut_items == items[: len(cut_items)]
        assert cut_text == text or length == context
        assert cut_items == items or sum(items[: len(cut_items) + 1]) > context
        assert shorter.shapes.name_of(place) == (f"s{row}" if named else str(row))
    assert {*short} <= {*shorter.shapes.sample_ids.tolist()}
    assert shorter.counts["listed"] + shorter.counts["dropped"] == len(rows)
    assert shorter.counts["truncated"] == len(shorter.shapes) - len(short)


def write(folder: Path, on_overlong: str, text: list[int]) -> TraceWorkload:
    """A trace of texts, all but the first with an image of 4 tokens; ids are strings."""
    sides = [[], *([[56]] * (len(text) - 1))]
    ids = [f"q{row}" for row in range(len(text))]
    table = pa.table({"sample_id": ids, "text_tokens": text, "image_widths": sides, "image_heights": sides})
    pq.write_table(table, folder / "mine.parquet")
    return TraceWorkload(path=str(folder / "mine.parquet"), on_overlong=on_overlong)


def test_the_default_names_row_and_sample(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        write(tmp_path, "error", [10, 6, 7, 30]).source(RULES)
    assert str(caught.value) == (
        f"workload.path={tmp_path}/mine.parquet: row 3 (sample q2) has 11 LLM tokens, but the model takes at most 10; "
        "2 of 4 rows are longer. Set workload.on_overlong=truncate or drop"
    )
    assert len(write(tmp_path, "error", [10, 6]).source(RULES).shapes) == 2
    assert len(write(tmp_path, "error", [99]).source(replace(RULES, context_tokens=None)).shapes) == 1


def test_other_choices_take_the_rest(tmp_path: Path) -> None:
    source = write(tmp_path, "truncate", [10, 6, 7, 30]).source(RULES)
    assert parts(source.shapes) == [(10, []), (6, [4]), (6, [4]), (6, [4])]
    assert source.counts == {"listed": 4, "truncated": 2, "dropped": 0}
    source = write(tmp_path, "drop", [10, 6, 7, 30]).source(RULES)
    assert [source.shapes.name_of(sample) for sample in range(len(source.shapes))] == ["q0", "q1"]
    assert source.counts == {"listed": 2, "truncated": 0, "dropped": 2}
    with pytest.raises(UserError, match="no row is left that fits the model's 10 tokens"):
        write(tmp_path, "drop", [11]).source(RULES)
