"""Units in groups of several widths train like one process: gradients, weights after three steps, losses."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program import Program
from entrain_bench.run.experiment import prepare
from entrain_bench.train.messages.rank_plan import block_of, lane_of_rank, places_of
from entrain_bench.train.modules import StageGroups, slices
from entrain_bench.train.running.runtime import build_runtime
from support.train.parity import RANKS, SPLIT, check, compare, reference_of
from support.train.ranks import run_ranks
from support.train.runs import AUDIO, config_from_json, configuration
from support.train.widths import EVERY, HALVED, SHARDED, SLICED

BRAID = ("strategy=braid", "layout.tp=1")
PIPELINED = ("strategy=hybrid_cp", "layout.pp=2")
FLEXSP = ("strategy=flexsp",)
TINY = ("model=tiny",)
# A few samples are far longer than the others, and attention is so slow that they decide the iteration.
SKEWED = (
    *TINY,
    "global_batch=12",
    "seed=1",
    "~workload.text",
    "+workload.text={kind: mixture, weights: [0.85, 0.15], components: [10, 600]}",
    "speed.attention=1e-5",
)
# Overrides, and a change of the program (``support.train.parity``).
type Case = tuple[tuple[str, ...], str]
# In every run of the tests; the others are for make test WIDE=1.
QUICK: list[Case] = [(HALVED, "")]
WIDE: list[Case] = [
    (SLICED, ""),
    (SHARDED, ""),
    (PIPELINED, ""),
    (FLEXSP, ""),
    (EVERY, ""),
    ((*SLICED, "sequence_parallel=false"), ""),
    ((*SLICED, "layout.recompute=[vision,llm]"), ""),
    (SLICED, SPLIT),
    ((*HALVED, "sequence_parallel=false"), SPLIT),
    ((*SHARDED, "sequence_parallel=false", "layout.recompute=[vision,llm]"), ""),
    ((*SLICED, "distributed_optimizer=true"), ""),
    ((*SLICED, "cp_split=pack"), ""),
    (("strategy=hybrid_cp",), ""),
    (("strategy=hybrid_cp", "layout.tp=2"), ""),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference_of(configuration(*TINY), tmp_path_factory.mktemp("widths"))


def check_widths(cases: list[Case], model: tuple[str, ...], reference: Path) -> None:
    given = [(configuration(*model, *overrides), change) for overrides, change in cases]
    assert check(given, reference) == len(cases)


def program_of(*overrides: str) -> Program:
    setting = prepare(config_from_json(configuration(*overrides)))
    layout = setting.strategy.plan(setting.profile)
    return setting.strategy.program(setting.source.batch(0, setting.job.global_batch, 0), layout, setting.profile)


@pytest.mark.timeout(300)
def test_groups_of_several_widths_train_like_one_process(reference: Path) -> None:
    check_widths(QUICK, TINY, reference)


@pytest.mark.wide
@pytest.mark.timeout(300)
def test_settings_train_like_one_process_in_groups(reference: Path) -> None:
    check_widths(WIDE, TINY, reference)


@pytest.mark.wide
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", [("model=tiny_av", AUDIO), (*TINY, "freeze=[vision]"), (*TINY, "freeze=[llm]")])
def test_models_train_like_one_process_in_groups(model: tuple[str, ...], tmp_path: Path) -> None:
    cases = [(SLICED, ""), (SHARDED, ""), (PIPELINED, ""), (FLEXSP, "")]
    check_widths(cases, model, reference_of(configuration(*model), tmp_path))


@pytest.mark.wide
@pytest.mark.timeout(300)
def test_braid_trains_long_samples_in_wide_groups_and_short_ones_in_narrow_groups(tmp_path: Path) -> None:
    program = program_of(*SKEWED, *BRAID)
    placed, chunks = program.layout.modules[-1], program.chunks[-1]
    widths = np.prod(placed.widths, axis=1)[placed.degree_of_copy[chunks.replica]]
    longest = np.array([program.shapes.llm_tokens[chunks.units(chunk)].max() for chunk in range(len(chunks))])
    assert {*widths[longest > 600].tolist()} == {2}
    assert {*widths[longest < 600].tolist()} == {1}
    check_widths([(BRAID, "")], SKEWED, reference_of(configuration(*SKEWED), tmp_path))


@pytest.mark.wide
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["counted_twice", "other_slices", "reversed_rows"])
def test_planted_faults_are_caught(fault: str, reference: Path) -> None:
    # Ranks that hold all tokens each have the whole gradient of a norm.
    overrides = SHARDED if fault == "other_slices" else (*SLICED, "sequence_parallel=false")
    given = configuration(*TINY, *overrides)
    assert max(run_ranks(gradient_error, RANKS, given, fault, reference, stay=False)) > 1


def gradient_error(rank: int, config: str, fault: str, reference: Path) -> float:
    """The worst gradient if ranks of a group each count what all use whole, or take the vocabulary in their order."""
    faults = {
        "counted_twice": patch.object(slices._CountedOnce, "apply", lambda value, _: value),
        "other_slices": patch.object(StageGroups, "renumbered", lambda _, ids, __: ids),
    }
    with faults.get(fault, nullcontext()):
        (found,) = compare(rank, [(config, fault if fault not in faults else "")], reference)
    assert isinstance(found, dict)
    return found["gradient"]


def test_a_step_has_widths_1_2_and_4_and_samples_of_text_alone() -> None:
    program = program_of(*TINY, *SLICED)
    for placed, chunks in zip(program.layout.modules, program.chunks, strict=True):
        used = {placed.degrees[degree] for degree in placed.degree_of_copy[chunks.replica].tolist()}
        assert {tp * cp for tp, cp in used} == {1, 2, 4}
        assert {tp for tp, _ in used} == {1, 2}
    assert np.any(np.diff(program.shapes.item_offsets) == 0)
    halved = program_of(*TINY, *HALVED)
    placed, chunks = halved.layout.modules[-1], halved.chunks[-1]
    assert {placed.degrees[degree] for degree in placed.degree_of_copy[chunks.replica].tolist()} == {*placed.widths}
    widths = [len({*placed.degree_of_copy[chunks.replica].tolist()}) for placed, chunks in _llm_of(PIPELINED, FLEXSP)]
    assert widths == [2, 2]


def _llm_of(*cases: tuple[str, ...]):
    for case in cases:
        program = program_of(*TINY, *case)
        yield program.layout.modules[-1], program.chunks[-1]


def test_ranks_are_in_one_group_of_each_width_and_blocks_are_consecutive() -> None:
    layout = program_of(*TINY, *SLICED).layout
    for rank in range(RANKS):
        mine = [place for place in places_of(layout, rank) if place.module == 1]
        degrees = layout.modules[1].degree_of_copy[[place.replica for place in mine]]
        assert degrees.tolist() == [0, 1, 2, 3, 4]
        blocks = [block_of(layout, 1, place.replica, 0) for place in mine]
        assert blocks == [[rank], *2 * [[rank & ~1, rank | 1]], *2 * [[0, 1, 2, 3]]]
        assert [block[place.position] for block, place in zip(blocks, mine, strict=True)] == [rank] * 5
        assert lane_of_rank(layout, rank) == rank


def test_slices_of_split_encoders_are_refused_in_one_line() -> None:
    setting = prepare(config_from_json(configuration(*TINY, *SLICED)))
    layout = setting.strategy.plan(setting.profile)
    own = {"tp": 2, "ranks": np.arange(4).reshape(2, 1, 2), "widths": ((2, 1), (4, 1))}
    modules = tuple(replace(placed, **own) for placed in layout.modules)
    with pytest.raises(IncompatibleError) as refused:
        build_runtime(replace(layout, modules=modules), setting.executor, torch.device("cpu"), 0, None)
    assert str(refused.value) == (
        "layout.vision.widths: harness=train cannot slice an encoder's weights split over TP 2 for groups of TP 4. Use "
        "harness=simulate, or groups of one TP"
    )
