"""Fair settings: one rule makes them of published ones, and refuses what differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrain_bench.answers.documents.claims import load_claims
from entrain_bench.answers.documents.sides import BASELINE, FREE, ClaimSide, check_fair, fair_side, published_side
from entrain_bench.base.errors import UserError

PUBLISHED = ClaimSide(
    words="as theirs",
    common=("model=m", "workload=w", "layout.tp=4", "microbatch_size=1", "cluster.device.memory_bytes=1"),
    of=("strategy=ours", "strategy.planner.encoder_tp=2", "cluster.num_nodes=33"),
    to=("strategy=megatron_rigid", "layout.pp=8", "encoder_sp=false", "cluster.num_nodes=32"),
)


def test_the_job_stays_and_everything_else_is_free() -> None:
    fair = fair_side(PUBLISHED, {"to": ["strategy=megatron"], "common": ["global_batch=512"]}, "Less of it.")
    assert fair.common == (*FREE, "model=m", "workload=w", "global_batch=512")
    assert fair.of == ("strategy=ours", "cluster.num_nodes=33")
    assert fair.to == ("strategy=megatron", "cluster.num_nodes=32")
    assert fair.words.startswith("Less of it. One rule for all claims")


def test_a_system_compared_with_itself_keeps_what_is_left_out() -> None:
    alone = replace(
        PUBLISHED,
        common=(*PUBLISHED.common, "strategy=ours"),
        of=("strategy.scheduler.search=0", "layout.pp=2"),
        to=("strategy.scheduler.search=16", "layout.pp=2"),
    )
    fair = fair_side(alone, {})
    assert (fair.of, fair.to) == (
        ("strategy=ours", "strategy.scheduler.search=0"),
        ("strategy=ours", "strategy.scheduler.search=16"),
    )


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
def test_a_fair_setting_that_differs_is_refused(stated: dict[str, list[str]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fair_side(PUBLISHED, stated)


def test_every_fair_setting_of_a_claim_follows_the_rule() -> None:
    fair = [claim.fair for claim in load_claims() if claim.fair]
    assert len(fair) > 40
    for side in fair:
        check_fair(side)
        assert not [text for text in side.common if text.startswith("layout.") and text not in FREE]
    assert sum(f"strategy={BASELINE}" in " ".join((*side.of, *side.to)) for side in fair) > 30


def test_settings_say_how_strategies_are_tuned() -> None:
    assert published_side(PUBLISHED).common[0] == "tuning=own"
    fair = fair_side(published_side(PUBLISHED), {"to": ["strategy=megatron"]})
    assert fair.common[0] == "tuning=equal"
    assert "tuning=own" not in fair.common


def test_the_second_of_two_situations_may_have_sides_of_its_own() -> None:
    two = replace(PUBLISHED, against_of=("strategy=whole",), against_to=("strategy=half",))
    assert [pair[0][-1] for pair in two.pairs] == ["cluster.num_nodes=33", "strategy=whole"]
    assert two.pairs[1][1] == (*PUBLISHED.common, "strategy=half")
    changed = two.changed({"to": ("layout.tp=2",)})
    assert changed.against_to == ("strategy=half", "layout.tp=2")
    assert changed.against_of == ("layout.tp=4", "strategy=whole"), "the other side keeps what was common"
