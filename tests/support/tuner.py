"""Candidates that planners offer to the tuner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from entrain_bench.balancing.fixed_jobs import recomputing
from entrain_bench.balancing.tuning import Trials, asked, tuning_batches
from entrain_bench.program.layout import Layout


class CaughtError(Exception):
    """Raised with the arguments of the tuner."""


def all_layouts(plan: Callable[[], Layout], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Layout], Trials]:
    """Every candidate of every fixed job that a planner offers to the tuner, and their simulations."""

    def catch(*given: object) -> Layout:
        raise CaughtError(*given)

    with monkeypatch.context() as patch:
        patch.setattr("entrain_bench.balancing.tuning.tuned", catch)
        with pytest.raises(CaughtError) as caught:
            plan()
    profile, sets, make_program, _ = caught.value.args
    jobs = [
        one
        for sized in profile.each_microbatch_size()
        for degrees in sized.job.degrees()
        for one in recomputing(
            replace(sized.job, request=replace(sized.job.request, tp=degrees.tp, cp=degrees.cp, dp=degrees.dp)),
            chosen_later=False,
        )
    ]
    offers = asked(profile, jobs, sets, 100, [])
    return [offer.layout for offer in offers], Trials(profile, make_program, tuning_batches(profile))
