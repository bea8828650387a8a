"""Workload analyses against values worked out by hand; bringing the data behind figures up to date."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from entrain_bench.answers import analysis as _analysis
from entrain_bench.answers.analysis import allocation_shares, analyse, encoder_shares, share_quantiles, token_quantiles
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.run.cells import compose_cells
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


def test_token_quantiles_refuse_a_modality_that_nothing_encodes() -> None:
    with pytest.raises(IncompatibleError, match="audio"):
        token_quantiles(profile((10, [400]), modality="audio"), num_samples=3, num_points=4)


def test_the_share_of_a_batch_is_its_encoder_time_over_its_whole_time() -> None:
    both = profile((10, [400]), (300, []))
    encoder, llm = both.estimates.samples(samples((10, [400]), (300, [])), 1, 1)
    assert encoder[1] == 0
    alone = set(np.round(encoder_shares(both, ONE_STAGE_EACH, 1, 50), 12))
    assert alone == {round(encoder[0] / (encoder[0] + llm[0]), 12), 0.0}
    in_pairs = set(np.round(encoder_shares(both, ONE_STAGE_EACH, 2, 50), 12))
    assert in_pairs == alone | {round(encoder[0] / (encoder[0] + llm.sum()), 12)}


def test_shares_narrow_as_batches_grow() -> None:
    arguments = {"batch_sizes": [4, 256], "num_draws": 40, "num_samples": 60, "probabilities": [0.05, 0.95]}
    table = share_quantiles(profile((10, [400]), (300, []), (100, [60])), **arguments)  # type: ignore[arg-type]
    assert table["batch_size"].tolist() == [0, 0, 4, 4, 256, 256]
    assert table["num_draws"].tolist() == [60, 60, 40, 40, 40, 40]
    low, high = table["encoder_share"].to_numpy().reshape(3, 2).T
    assert np.all(np.diff(high - low) < 0)


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


def test_allocations_of_wide_stages_are_in_gpus() -> None:
    job = tiny_job(tiny_model(8, 8), request=LayoutRequest(tp=2, cp=1, pp=4, dp=1))
    same = profile_of(job, samples((10, [400])))
    table = allocation_shares(same, batch_sizes=[1], num_draws=5, max_batch=8)
    share = float(encoder_shares(same, Degrees(2, 1, 4, 1), 1, 1)[0])
    gpus = min(max(round(8 * share), 2), 6)
    amounts = ["encoder_gpus", "llm_gpus", "encoder_stages", "llm_stages"]
    assert table[table["share"] > 0][amounts].values.tolist() == [[gpus, 8 - gpus, gpus // 2, 4 - gpus // 2]]
    assert table["encoder_gpus"].tolist() == [2, 3, 4, 5, 6]


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


def test_tables_of_cells_have_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = compose_cells(["figure=schedule_gantt", "strategy=megatron,entrain"], multirun=True)
    monkeypatch.setattr(_analysis, "prepare", lambda config: SimpleNamespace(profile=config.seed))

    def compute(profile: Profile, factor: int) -> pd.DataFrame:
        assert isinstance(profile, int)  # the seed stands in for it
        return pd.DataFrame({"value": [factor, 2 * factor]})

    found = analyse(cells, compute, factor=3)
    assert found["value"].tolist() == [3, 6] * 2
    assert found["workload"].tolist() == ["opencqa_ocr"] * 4
