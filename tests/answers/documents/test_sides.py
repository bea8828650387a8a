"""Settings of claims: one rule makes fair ones of published ones, and changes replace overrides."""

from __future__ import annotations

import pytest

from entrain_bench.answers.documents.claim import load_claims
from entrain_bench.answers.documents.sides import FREE, Change, ClaimSetting, Measure, Situation, fair_setting
from entrain_bench.base.errors import UserError

MEASURE = Measure("iteration_time_s")
PUBLISHED = ClaimSetting(
    "as theirs",
    MEASURE,
    common=("tuning=own", "model=m", "workload=w", "layout.tp=4", "microbatch_size=1", "cluster.device.memory_bytes=1"),
    situations=(
        Situation(
            of=("strategy=ours", "strategy.planner.encoder_tp=2", "cluster.num_nodes=33"),
            to=("strategy=megatron_rigid", "layout.pp=8", "encoder_sp=false", "cluster.num_nodes=32"),
        ),
    ),
)


def test_the_job_stays_and_everything_else_is_free() -> None:
    fair = fair_setting(
        PUBLISHED, {"to": ["strategy=megatron"], "common": ["global_batch=512"]}, MEASURE, "Less of it."
    )
    assert fair.common == (*FREE, "model=m", "workload=w", "global_batch=512")
    assert fair.situations == (
        Situation(("strategy=ours", "cluster.num_nodes=33"), ("strategy=megatron", "cluster.num_nodes=32")),
    )
    assert fair.words.startswith("Less of it. One rule for all claims")


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({}, r"fair.to=.*: must be given, with strategy=megatron"),
        ({"to": ["strategy=megatron", "layout.tp=8"]}, "fair=layout.tp=8: must be a strategy, a part"),
        ({"to": ["strategy=megatron", "microbatch_size=4"]}, "fair=microbatch_size=4: must be"),
        ({"to": ["strategy=megatron", "strategy.planner.split=uniform"]}, "fair=strategy.planner.split=uniform"),
        ({"to": ["strategy=megatron", "encoder_sp=false"]}, "fair=encoder_sp=false"),
        ({"to": ["strategy=megatron"], "common": ["layout.recompute=[]"]}, "fair.common=layout.recompute"),
        ({"to": ["strategy=megatron"], "common": ["strategy.planner.num_trials=8"]}, "fair.common=strategy.planner"),
    ],
)
def test_a_fair_setting_that_differs_is_refused(stated: Change, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fair_setting(PUBLISHED, stated, MEASURE)


def test_every_fair_setting_of_a_claim_is_free() -> None:
    fair = [claim.fair for claim in load_claims() if claim.fair]
    assert len(fair) > 40
    for setting in fair:
        assert setting.common[: len(FREE)] == FREE
        assert not [text for text in setting.common if text.startswith("layout.") and text not in FREE]
    assert sum(any("megatron" in text for text in " ".join(setting.sweeps[-1]).split("=")) for setting in fair) > 30


def test_a_change_takes_the_place_of_overrides_of_the_same_key() -> None:
    two = (Situation(("s=x", "c=3"), ("s=y",), ("d=1",)), Situation(("s=x", "c=3"), ("s=y",), ("d=2",)))
    setting = ClaimSetting("", MEASURE, ("a=1", "b=2"), two)
    changed = setting.changed({"common": ("a=5", "c=6", "e=7")})
    assert changed.common == ("b=2", "a=5", "c=6", "e=7")
    assert changed.situations[1] == Situation(("s=x",), ("s=y",), ("d=2",))
    # If one side changes an override of all runs, the other side keeps it.
    changed = setting.changed({"to": ("b=9", "s=z")})
    assert changed.common == ("a=1",)
    assert changed.situations[0] == Situation(("b=2", "s=x", "c=3"), ("b=9", "s=z"), ("d=1",))
    with pytest.raises(UserError, match="change=d: must be a key other than those of at and against"):
        setting.changed({"common": ("d=8",)})
    alone = ClaimSetting("", MEASURE, ("a=1",), (Situation(("b=2",)),))
    assert alone.changed({"of": ("a=3",)}) == ClaimSetting("", MEASURE, (), (Situation(("b=2", "a=3")),))
