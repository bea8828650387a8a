"""The batch sampler: what an epoch is, that ranks agree, and where it goes on."""

import io
import json
import multiprocessing
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.config.tree import choices
from entrain_bench.program.layout import Layout, layout_to_json
from entrain_bench.sampler import BalancedBatchSampler
from entrain_bench.sampler.planning import deal, split
from entrain_bench.specs.shapes import SampleShapes
from support.builders import labels, random_samples, rngs

RANKS, BATCH, MICROBATCH, SAMPLES = 4, 16, 2, 70
ITERATIONS = SAMPLES // BATCH
STRATEGIES = ("megatron", "disttrain")
# Assigners that know no ranks of one width.
OF_WIDTHS = {"bytescale", "flexsp", "hybrid_cp", "lpt_widths"}


@cache
def shapes() -> SampleShapes:
    return random_samples(np.random.default_rng(0), SAMPLES)


def sampler(strategy: str = "entrain", rank: int = 0, data: Any = None, **more: Any) -> BalancedBatchSampler:
    given = {"model": "tiny", "cluster": "tiny", "global_batch": BATCH, "microbatch_size": MICROBATCH}
    given |= {"world_size": RANKS} | more
    return BalancedBatchSampler(shapes() if data is None else data, strategy=strategy, rank=rank, **given)


@cache
def arrivals() -> list[list[int]]:
    """Samples of every iteration."""
    one = sampler("megatron")
    rows = [[one.microbatches(i, rank=rank) for rank in range(RANKS)] for i in range(ITERATIONS)]
    return [sorted(index for rank in ranks for row in rank for index in row) for ranks in rows]


@pytest.mark.wide
@pytest.mark.parametrize("strategy", sorted({*choices("strategy")} - OF_WIDTHS))
def test_ranks_share_every_global_batch_without_overlap(strategy: str) -> None:
    one = sampler(strategy, counts="assigned")
    # What another rank takes is what this one knows of it.
    stream = iter(sampler(strategy, RANKS - 1, counts="assigned"))
    seen = set[int]()
    for iteration in range(ITERATIONS):
        ranks = [one.microbatches(iteration, rank=rank) for rank in range(RANKS)]
        assert [*islice(stream, len(ranks[-1]))] == ranks[-1]
        dealt = sorted(index for rows in ranks for row in rows for index in row)
        # The same samples as without balancing, each once.
        assert dealt == arrivals()[iteration]
        assert len({*dealt}) == BATCH
        assert not seen & {*dealt}
        seen |= {*dealt}
    assert next(stream, None) is None
    assert len(seen) == ITERATIONS * BATCH


def test_balanced_ranks_have_more_even_work_than_in_order_of_arrival() -> None:
    # Long enough that work goes by tokens, not by kernels. Without items Entrain deals in order of arrival, so that one
    # late long sample makes its ranks uneven; DFLOP deals by LLM work.
    long = random_samples(np.random.default_rng(0), SAMPLES, longest=20_000, max_items=0)
    work = long.llm_tokens

    def spread(strategy: str) -> float:
        one = sampler(strategy, data=long, world_size=2)
        loads = [
            [sum(int(work[row].sum()) for row in one.microbatches(iteration, rank=rank)) for rank in range(2)]
            for iteration in range(ITERATIONS)
        ]
        return float(np.mean(np.max(loads, axis=1) / np.mean(loads, axis=1)))

    assert spread("dflop") - 1 < (spread("megatron") - 1) / 2


def test_what_is_believed_of_ranks_adds_up_and_is_evened_out() -> None:
    arrival, balanced = (np.array([sampler(name).believed_s(i) for i in range(ITERATIONS)]) for name in STRATEGIES)
    assert arrival.shape == (ITERATIONS, RANKS)
    assert balanced.sum(axis=1) == pytest.approx(arrival.sum(axis=1))
    assert np.mean(balanced.max(axis=1)) < 0.95 * np.mean(arrival.max(axis=1))


def test_an_order_belongs_to_seed_and_epoch() -> None:
    first = sampler()
    one, two = [*first], [*first]
    assert one != two
    assert first.epoch == 1
    first.set_epoch(0)
    assert [*first] == one
    assert [*sampler(seed=1)] != one
    again = sampler()
    again.set_epoch(1)
    assert [*again] == two
    plain = sampler("megatron", shuffle=False)
    assert next(iter(plain)) == [0, 1]
    assert next(iter(plain)) == [0, 1]


def test_an_epoch_that_was_left_begins_anew() -> None:
    one = sampler()
    whole = [*one]
    one.set_epoch(0)
    assert [*islice(one, 3)] == whole[:3]
    assert [*one] == whole


@pytest.mark.wide
@pytest.mark.parametrize("taken", [1, 2, 8])
@pytest.mark.parametrize("strategy", ["entrain", "dflop"])
def test_a_state_goes_on_where_it_was_taken(strategy: str, taken: int) -> None:
    one = sampler(strategy)
    two_epochs = [*one, *one]
    one = sampler(strategy)
    assert [*islice(one, taken)] == two_epochs[:taken]
    state = one.state_dict()
    assert json.loads(json.dumps(state)) == state
    content = io.BytesIO()
    torch.save(state, content)
    content.seek(0)
    other = sampler(strategy)
    other.load_state_dict(torch.load(content, weights_only=True))
    other.set_epoch(other.epoch)
    own_epoch = two_epochs[taken : len(one)] or two_epochs[len(one) :]
    assert [*other] == own_epoch
    if taken < len(one):
        assert [*other] == two_epochs[len(one) :]


def test_a_state_is_of_what_was_trained_on_not_of_what_a_loader_took() -> None:
    one = sampler()
    whole = [*one]
    one.set_epoch(0)
    next(islice(one, 6, None))
    other = sampler()
    other.load_state_dict(one.state_dict(iteration=1))
    assert [*other] == whole[2:]
    end = one.state_dict(iteration=ITERATIONS)
    assert (end["epoch"], end["iteration"]) == (1, 0)


def test_between_iterations_the_strategy_and_the_ranks_may_change() -> None:
    old = [sampler("megatron", rank) for rank in range(RANKS)]
    for one in old:
        next(islice(one, 2, None))
    state = old[0].state_dict(iteration=1)
    new = [sampler("dflop", rank, world_size=2) for rank in range(2)]
    for one in new:
        one.load_state_dict(state)
    wanted = sorted(i for one in old for row in one.microbatches(1) for i in row)
    assert sorted(i for one in new for row in islice(one, 4) for i in row) == wanted


@pytest.mark.wide
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "state: seed=0: must be 1, as in this sampler"),
        ({"shuffle": False}, "state: shuffle=True: must be False"),
        ({"global_batch": 8}, "state: global_batch=16: must be 8"),
        ({"data": random_samples(np.random.default_rng(1), SAMPLES)}, "state: samples="),
        ({"strategy": "megatron"}, "state: microbatch=1: must be 0 .the start of an iteration"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    one = sampler()
    next(iter(one))
    with pytest.raises(UserError, match=message):
        sampler(**change).load_state_dict(one.state_dict())


def test_assigners_may_choose_the_number_of_microbatches() -> None:
    # One sample has nearly all the work: its rank has fewer microbatches than the others.
    few = random_samples(np.random.default_rng(3), BATCH, longest=8)
    heavy = SampleShapes(**{**_columns(few), "text_tokens": np.where(np.arange(BATCH) == 0, 100_000, few.text_tokens)})
    one = sampler("dflop", data=heavy, counts="assigned", microbatch_size=1)
    counts = [len(one.microbatches(0, rank=rank)) for rank in range(RANKS)]
    assert sum(sum(map(len, one.microbatches(0, rank=rank))) for rank in range(RANKS)) == BATCH
    assert len([*one]) == counts[0]
    assert one.num_microbatches is None
    with pytest.raises(TypeError, match="needs counts=fixed"):
        len(one)


def test_fixed_counts_are_the_same_everywhere() -> None:
    one = sampler("dflop")
    assert one.num_microbatches == BATCH // RANKS // MICROBATCH
    dealt = [one.microbatches(i, rank=rank) for i in range(ITERATIONS) for rank in range(RANKS)]
    assert {len(rows) for rows in dealt} == {one.num_microbatches}
    assert len(one) == len([*one]) == ITERATIONS * one.num_microbatches


def _columns(given: SampleShapes) -> dict[str, Any]:
    return {name: getattr(given, name) for name in SampleShapes.__dataclass_fields__ if not name.startswith("_")}


def test_a_trace_gives_row_numbers(tmp_path: Path) -> None:
    import pandas as pd

    path = tmp_path / "it's mine.parquet"
    pd.DataFrame({"sample_id": [7, 3, 9, 1], "text_tokens": [5, 6, 7, 8]}).to_parquet(path)
    one = sampler("megatron", data=path, world_size=1, global_batch=4, shuffle=False)
    assert [*one] == [[0, 1], [2, 3]]


def test_rows_that_are_dropped_are_skipped_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    import pandas as pd

    path = tmp_path / "mine.parquet"
    pd.DataFrame({"text_tokens": [5, 10**6, 7, 8, 9]}).to_parquet(path)
    drop = ("workload.on_overlong=drop",)
    one = sampler("megatron", data=path, world_size=1, global_batch=2, overrides=drop)
    assert sorted(row for rows in one for row in rows) == [0, 2, 3, 4]


def test_a_scanned_trace_gives_rows_of_its_data_set(tmp_path: Path) -> None:
    import pandas as pd

    path = tmp_path / "mine.parquet"
    rows = [1, 4, 5, 7, 8]
    pd.DataFrame({"text_tokens": [5, 10**6, 7, 8, 9], "dataset_row": rows}).to_parquet(path)
    given: dict[str, Any] = {"data": path, "world_size": 1, "global_batch": 2, "shuffle": False}
    assert [*sampler("megatron", **given, overrides=("workload.on_overlong=truncate",))] == [[1, 4], [5, 7]]
    assert [*sampler("megatron", **given, overrides=("workload.on_overlong=drop",))] == [[1, 5], [7, 8]]
    pd.DataFrame({"text_tokens": [5, 6], "dataset_row": [None, None]}).to_parquet(path)
    with pytest.raises(UserError, match=r"mine.parquet: lists a part of the data set, .*max_rows=null"):
        sampler("megatron", **given)


def test_a_planned_layout_is_the_same_on_every_rank_and_may_be_handed_in() -> None:
    given = {"layout": "planned", "world_size": 2, "overrides": ("layout.tp=1",)}
    one, two = (sampler(rank=rank, **given) for rank in range(2))
    assert layout_to_json(one.layout) == layout_to_json(two.layout)
    assert one.layout.modules[-1].dp == 2
    assert sum(placed.pp for placed in one.layout.modules) > 1
    assert [*sampler(layout=one.layout, world_size=2, overrides=("layout.tp=1",))] == [*one]
    plain = sampler().layout
    assert isinstance(plain, Layout)
    assert [(placed.pp, placed.dp) for placed in plain.modules] == [(1, RANKS), (1, RANKS)]


@pytest.mark.parametrize("strategy", sorted(OF_WIDTHS))
def test_groups_of_several_widths_are_refused_before_training(strategy: str) -> None:
    with pytest.raises(IncompatibleError, match="several widths"):
        sampler(strategy)
    with pytest.raises(IncompatibleError, match=r"^layout.vision.widths: must be empty.*Use layout=data_parallel or"):
        sampler(strategy, layout="planned", overrides=("layout.tp=1",))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"rank": 4}, r"rank=4: must be 0..3"),
    ({"rank": None}, "rank=None: must be given, because torch.distributed is not initialized"),
    ({"world_size": 0}, "rank=0: must be 0..-1|world_size=0: must be"),
    ({"global_batch": 12}, "global_batch=12: must be a multiple of world_size=4 x microbatch_size=2"),
    ({"global_batch": 80}, "global_batch=80: must be at most 70, the number of samples"),
    ({"microbatch_size": 0}, "microbatch_size=0: must be at least 1"),
    ({"seed": -1}, r"seed=-1: must be in 0..2\^32-1"),
    ({"strategy": "entrian"}, r"entrian"),
    ({"counts": "even"}, "counts=even: unknown.*assigned, equal, fixed"),
    ({"layout": "pipelined"}, "layout=pipelined: unknown.*data_parallel, planned"),
    ({"overrides": ("seed=3",)}, "overrides=seed=3: must be without seed"),
    ({"overrides": ("layout.pp=2",)}, "layout.pp=2: must be 1 with layout=data_parallel"),
    (
        {"data": [1, 2]},
        r"shapes=list: must be SampleShapes \(entrain_bench.shapes_of makes them of arrays\) or the path",
    ),
    ({"world_size": 8}, "cluster|ranks"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[str(change) for change, _ in BAD])
def test_what_is_wrong_is_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        sampler(**change)
    assert "\n" not in str(caught.value)


def test_other_iterations_than_there_are_are_refused() -> None:
    one = sampler()
    with pytest.raises(UserError, match=r"iteration=4: must be 0..3"):
        one.microbatches(4)
    with pytest.raises(UserError, match=r"iteration=5: must be 0..4"):
        one.state_dict(iteration=5)
    with pytest.raises(UserError, match="epoch=-1: must be at least 0"):
        one.set_epoch(-1)


@pytest.mark.wide
def test_a_loader_with_workers_runs_ahead_and_iterations_are_still_told_apart() -> None:
    one = sampler(counts="assigned")
    # Workers that fork from a process with threads may hang; indices need nothing of it.
    context = multiprocessing.get_context("forkserver")
    loader = DataLoader(
        range(SAMPLES),  # type: ignore[arg-type]
        batch_sampler=one,
        num_workers=1,
        prefetch_factor=4,
        multiprocessing_context=context,
        collate_fn=list,
    )
    batches = iter(loader)
    for iteration in range(ITERATIONS):
        wanted = one.microbatches(iteration, epoch=0)
        assert [*islice(batches, len(wanted))] == wanted
    assert next(batches, None) is None


# Microbatches of ranks.


def test_ranks_get_their_microbatches_in_order_and_samples_in_order_of_arrival() -> None:
    dealt = deal(labels([1, 0, 1, 0, 1], [4, 0, 2, 0, 4]), 2)
    assert dealt == (((1, 3),), ((2,), (0, 4)))


@pytest.mark.parametrize("counts", ["fixed", "equal"])
def test_ranks_with_fewer_microbatches_split_those_with_most_samples(counts: str) -> None:
    dealt = deal(labels([0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 2]), 2, counts, 3)
    assert dealt == (((0, 1), (2,), (3, 4)), ((5,), (6,), (7,)))


def test_of_equally_large_microbatches_the_first_is_split() -> None:
    assert split([(0, 1), (2, 3)], 3) == [(0,), (1,), (2, 3)]
    assert split([(0, 1)], 0) == [(0, 1)]


@given(rngs, st.integers(1, 4), st.integers(1, 6))
def test_splitting_loses_no_sample_and_levels_sizes(rng: np.random.Generator, num_ranks: int, count: int) -> None:
    size = num_ranks * count * 3
    replica = np.arange(size) % num_ranks
    dealt = deal(labels(replica, rng.integers(0, count, size)), num_ranks, "fixed", count)
    for rank, rows in enumerate(dealt):
        assert len(rows) == count
        assert all(rows)
        assert sorted(index for row in rows for index in row) == np.flatnonzero(replica == rank).tolist()


@pytest.mark.parametrize(
    ("replica", "microbatch", "counts", "message"),
    [
        ([0, 0], [0, 1], "assigned", "rank 1 received no sample of a global batch"),
        (
            [0, 1, 1],
            [0, 0, 1],
            "equal",
            r"rank 0 has 1 samples in 1 microbatches, which cannot be split into 2. .*counts=assigned",
        ),
        (
            [0, 0, 1],
            [0, 1, 0],
            "fixed",
            r"rank 0 has 2 samples in 2 microbatches, which cannot be split into 1. .*counts=equal",
        ),
    ],
)
def test_what_cannot_be_dealt_is_one_line(replica: list[int], microbatch: list[int], counts: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        deal(labels(replica, microbatch), 2, counts, 1)
