"""Every phase by itself: micro-steps stay, loads even out, and rearrangement moves less between nodes."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.program.assignment import Assignment
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare
from entrain_bench.specs.shapes import SampleShapes


def setting(*overrides: str) -> RunContext:
    small = ["strategy=orchmllm", "model=tiny_av", "workload=synthetic_av", "cluster=a40x16", "global_batch=64"]
    return prepare(compose_cells([*small, "microbatch_size=2", "layout.tp=1", "layout.dp=null", *overrides])[0].config)


def assigned(made: RunContext) -> tuple[SampleShapes, Assignment]:
    layout = made.strategy.plan(made.profile)
    shapes = made.profile.samples.draw(made.job.global_batch)
    return shapes, made.strategy.assigner.assign(shapes, layout, made.profile)


def fullest(values: np.ndarray, replica: np.ndarray, row: np.ndarray) -> float:
    table = np.zeros((row.max() + 1, 16))
    np.add.at(table, (row, replica), values)
    return float(table.max(axis=1).sum())


def test_every_phase_is_evener_than_on_arrival_and_keeps_its_micro_steps() -> None:
    made, plain = setting(), setting("strategy=fsdp")
    (shapes, ours), (same, arrived) = assigned(made), assigned(plain)
    np.testing.assert_array_equal(shapes.sample_ids, same.sample_ids)
    for module, one, other in zip(made.job.model.modules, ours.modules, arrived.modules, strict=True):
        np.testing.assert_array_equal(one.microbatch, other.microbatch)
        cost = module.forward_flops(module.lengths(shapes, module.units(shapes)))
        ours_most, arrived_most = (fullest(cost, each.replica, one.microbatch) for each in (one, other))
        # Of audio the longest segment is more than the others' share.
        assert ours_most <= arrived_most if module.name == "audio" else ours_most < arrived_most, module.name


def test_rearrangement_leaves_balance_alone_and_keeps_more_on_its_node() -> None:
    (shapes, near), (_, far) = assigned(setting()), assigned(setting("strategy.assigner.node_wise=false"))
    model, kept = setting().job.model, []
    for labels in (near, far):
        llm, total = labels.modules[-1], 0
        for module, own in zip(model.encoders, labels.modules, strict=False):
            units = module.units(shapes)
            home = llm.replica[shapes.item_sample[units]]
            total += int(shapes.item_llm_tokens[units][own.replica // 4 == home // 4].sum())
        kept.append(total)
    assert kept[0] > kept[1]
    for module, one, other in zip(model.modules, near.modules, far.modules, strict=True):
        cost = module.forward_flops(module.lengths(shapes, module.units(shapes)))
        rows = [fullest(cost, each.replica, each.microbatch) for each in (one, other)]
        assert rows[0] == pytest.approx(rows[1], rel=1e-12)


@pytest.mark.wide
def test_a_padded_module_must_be_one_of_the_models() -> None:
    made = setting("strategy.assigner.padded=[pictures]")
    layout = setting("strategy=fsdp").strategy.plan(made.profile)
    drawn = made.profile.samples.draw(64)
    with pytest.raises(UserError, match=r"strategy.assigner.padded=pictures"):
        made.strategy.assigner.assign(drawn, layout, made.profile)
    shapes, padded = assigned(setting("strategy.assigner.padded=[audio]"))
    assert len(padded.modules[1].replica) == len(setting().job.model.encoders[1].units(shapes))
