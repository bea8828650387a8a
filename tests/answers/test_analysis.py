"""Workload analyses against values worked out by hand; bringing the data behind figures up to date."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from entrain_bench.answers.analysis import allocation_shares, encoder_shares, token_quantiles
from entrain_bench.balancing.profile import Profile
from entrain_bench.specs.job import Degrees, LayoutRequest
from support.builders import profile_of, samples, tiny_job, tiny_model

ONE_STAGE_EACH = Degrees(1, 1, 8, 1)


def profile(*rows: tuple[int, Sequence[int]], modality: str = "image") -> Profile:
    """A replica of 8 stages, and a workload of the given samples (text tokens, encoder tokens of each item)."""
    job = tiny_job(tiny_model(8, 8), request=LayoutRequest(tp=1, cp=1, pp=8, dp=1))
    return profile_of(job, samples(*rows, modality=modality))


def test_token_quantiles_are_tokens_of_samples_in_order() -> None:
    table = token_quantiles(profile((10, [400]), (20, [40, 40]), (5, [])), num_samples=3, num_points=4)
    assert table["probability"].tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert table["encoder_tokens"].tolist() == [0, 0, 80, 400]
    assert table["llm_tokens"].tolist() == [5, 5, 20 + 10 + 10, 10 + 100]


def test_the_share_of_a_batch_is_its_encoder_time_over_its_whole_time() -> None:
    both = profile((10, [400]), (300, []))
    encoder, llm = both.estimates.samples(samples((10, [400]), (300, [])), 1, 1)
    assert encoder[1] == 0
    alone = set(np.round(encoder_shares(both, ONE_STAGE_EACH, 1, 50), 12))
    assert alone == {round(encoder[0] / (encoder[0] + llm[0]), 12), 0.0}
    in_pairs = set(np.round(encoder_shares(both, ONE_STAGE_EACH, 2, 50), 12))
    assert in_pairs == alone | {round(encoder[0] / (encoder[0] + llm.sum()), 12)}


def test_equal_samples_have_one_allocation() -> None:
    same = profile((10, [400]))
    table = allocation_shares(same, batch_sizes=[1, 4], num_draws=5, max_batch=8)
    share = float(encoder_shares(same, ONE_STAGE_EACH, 1, 1)[0])
    stages = min(max(round(8 * share), 1), 7)
    assert table[table["share"] > 0][["batch_size", "encoder_stages", "llm_stages", "share"]].values.tolist() == [
        [1, stages, 8 - stages, 1.0],
        [4, stages, 8 - stages, 1.0],
    ]
    assert len(table) == 2 * 7
    assert set(table["stable_batch"]) == {1}
    assert set(table["num_draws"]) == {5}


def test_allocations_of_a_batch_size_sum_to_one() -> None:
    table = allocation_shares(profile((10, [400]), (300, [])), batch_sizes=[1, 2], num_draws=30, max_batch=1)
    assert table.groupby("batch_size")["share"].sum().tolist() == pytest.approx([1, 1])
    # Alone, a sample without items leaves the encoder the one stage it must have.
    assert table[table["batch_size"] == 1].set_index("encoder_stages")["share"][1] > 0


def test_the_stable_batch_is_where_a_mixture_settles() -> None:
    def stable(max_batch: int) -> int:
        table = allocation_shares(profile((10, [400]), (300, [])), batch_sizes=[1], num_draws=59, max_batch=max_batch)
        return int(table["stable_batch"].iloc[0])

    found = stable(1 << 14)
    assert found > 1
    assert found & (found - 1) == 0
    assert stable(2) == 0
