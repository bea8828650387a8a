"""Profiles: options, repetitions, and a real one of the tiny model, interrupted, continued, and simulated with."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.cli import EXIT_INTERRUPTED, run_command
from entrain_bench.config.compose import compose
from entrain_bench.costs.profiled.file import COLLECTIVES, read_profile, write_profile
from entrain_bench.run.cells import compose_cells
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.measuring import Clock
from entrain_bench.train.profiling.settings import ProfileSettings
from entrain_bench.train.profiling.timing import (
    WARM_UPS,
    Bench,
    Patience,
    Target,
    measure_collectives,
    one_of_many,
    packs_of,
    sample,
    split_tokens,
    targets_of,
)
from support.cli import asked
from support.profiled import profile_of_formula
from support.train.modules import small_model


def composed(*overrides: str) -> tuple[ModelSpec, ProfileSettings]:
    _, request = asked(shlex.join(["profile", *overrides]))
    return ModelSpec.from_config(compose(*request.overrides).model), request.keys


BAD_OPTIONS = [
    ("model=tinny", "did you mean tiny, tiny_av or tiny_moe?"),
    ("token=[1]", "did you mean tokens=[1]?"),
    ("tokens=many", "tokens"),
    ("tokens=[]", "at least one number of tokens"),
    ("tokens=[16,0]", "tokens=[16, 0]: must be different integers of at least 1"),
    ("tokens=[16,16]", "tokens=[16, 16]: must be different integers of at least 1"),
    ("tp=[]", "at least one degree"),
    ("cp=[2]", "degrees of which one is 1"),
    ("tp=[1,3]", "tp=3: must divide the 4 heads of module vision"),
    ("ranks=[1]", "at least 2"),
    ("message_bytes=[0]", "at least 1"),
    ("device=tpu", "device=tpu: unknown"),
    ("device=cuda", "device=cuda: this machine has no CUDA device"),
    ("dtype=float16", "dtype=float16: unknown"),
    ("threads=0", "threads=0: must be at least 1"),
    ("repetitions=0", "repetitions=0: must be at least 1"),
    ("point_s=0", "point_s=0.0: must be positive"),
    ("model=mllm_9b", "has a generator (generator), which entrain-bench profile does not"),
    ("strategy=entrain", "strategy"),
]


@pytest.mark.wide
@pytest.mark.parametrize(("overrides", "says"), BAD_OPTIONS, ids=[case[0] for case in BAD_OPTIONS])
def test_bad_options_are_one_line_and_exit_code_2(
    overrides: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    assert run_command(["profile", "model=tiny", *overrides.split(), f"output={path}"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.strip().splitlines()
    assert line.startswith("entrain-bench: ")
    assert says in line
    assert not path.exists()


def test_the_profile_of_another_device_is_not_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = composed("model=tiny")
    path = tmp_path / "profile.json"
    write_profile(path, profile_of_formula(model, tokens=(1,)))
    before = path.read_bytes()
    assert run_command(["profile", "model=tiny", f"output={path}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "holds a profile with device=made up. Choose another file, or remove it" in line
    assert path.read_bytes() == before


def test_degrees_are_those_that_divide_the_model() -> None:
    found = composed("model=tiny")[1].degrees(composed("model=tiny")[0])
    assert found == [(tp, cp) for tp in (1, 2, 4) for cp in (1, 2, 4)]
    model, settings = composed("tp=[1,2]", "cp=[1]")
    assert settings.degrees(model) == [(1, 1), (2, 1)]


CPU = torch.device("cpu")


class Turns:
    """Two parts that take the given seconds each."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls = 0

    def __call__(self, clock: Clock) -> None:
        self.calls += 1
        for part in range(2):
            with clock.action(part):
                time.sleep(self.seconds)


def test_repetitions_are_as_many_as_asked_for() -> None:
    turns = Turns(0.002)
    rows = sample(turns, CPU, Patience(4, 10.0))
    assert rows.shape == (4, 2)
    assert turns.calls == WARM_UPS + 4
    assert (rows >= 0.002).all()


def test_slow_ones_end_with_their_time_and_are_hardly_warmed_up() -> None:
    turns = Turns(0.03)
    rows = sample(turns, CPU, Patience(50, 0.1))
    assert len(rows) <= 3
    assert turns.calls == 1 + len(rows)


VISION, LLM = ModelSpec.from_config(compose_cells(["model=tiny"])[0].config.model).modules


@given(tokens=st.integers(1, 10_000), share=st.floats(0, 1))
def test_lengths_are_positive_and_add_up(tokens: int, share: float) -> None:
    number = 1 + int(share * (tokens**0.5 - 1))
    lengths = split_tokens(tokens, number)
    assert len(lengths) == number
    assert sum(lengths) == tokens
    assert min(lengths) >= 1
    assert lengths[-1] == max(lengths)


def test_blocks_take_one_a_few_and_many_sequences_and_ends_one() -> None:
    embed, block, head = targets_of(LLM, 1)
    assert [len(lengths) for lengths in packs_of(block, 256)] == [1, 4, 16]
    assert [len(lengths) for lengths in packs_of(block, 1)] == [1]
    assert [*packs_of(embed, 256)] == [*packs_of(head, 256)] == [(256,)]


@pytest.mark.parametrize(("context", "numbers"), [(8192, [16, 256]), (1023, [128, 256]), (100, [])])
def test_no_sequence_is_longer_than_the_context(context: int, numbers: list[int]) -> None:
    short = replace(LLM, config=replace(LLM.config, context_tokens=context))
    packs = [*packs_of(targets_of(short, 1)[1], 65536)]
    assert [len(lengths) for lengths in packs] == numbers
    assert all(max(lengths) <= context for lengths in packs)


OPTIONS = (
    "profile",
    "model=tiny",
    "device=cpu",
    "tokens=[1,64]",
    "tp=[1]",
    "cp=[1]",
    "ranks=[]",
    "repetitions=2",
)
PATIENCE = Patience(1, 60.0)
# TP and CP.
DEGREES = (1, 1), (2, 1), (1, 2), (2, 4)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Packs that are measured; the fifth is interrupted."""
    # The command hides GPUs for good; after the test they are back.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    measured: list[tuple[int, ...]] = []
    measure = Bench.measure

    def counting(self: Bench, target: Target, stages: Any, lengths: tuple[int, ...], patience: Patience) -> object:
        measured.append(lengths)
        if len(measured) == 5:
            raise KeyboardInterrupt
        return measure(self, target, stages, lengths, patience)

    monkeypatch.setattr(Bench, "measure", counting)
    return measured


@pytest.mark.wide
def test_a_profile_is_measured_goes_on_where_it_stopped_and_is_simulated_with(
    counted: list[tuple[int, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    arguments = [*OPTIONS, "point_s=60", f"output={path}"]
    assert run_command(arguments) == EXIT_INTERRUPTED
    stopped = read_profile(path, "x")
    assert not stopped.finished
    # An embedding at both numbers of tokens, and two packs of a block, in stages of one block and of several.
    assert len(stopped.stages) == 6
    simulate = ["model=tiny", "cluster=tiny", "cluster/device=profiled", f"cluster.device.path={path}"]
    assert run_command([*simulate, f"results_dir={tmp_path}"]) == 2
    assert "is not finished. To resume, run entrain-bench profile with the same options" in capsys.readouterr().err
    assert run_command(arguments) == 0
    profile = read_profile(path, "x")
    assert profile.finished
    assert profile.stages[:6] == stopped.stages
    assert profile.constants == stopped.constants
    # Vision: two embeddings, 1 + 3 packs of each kind of block, two heads; the LLM: one kind of block less.
    assert len(counted) == 1 + (2 + 4 + 4 + 2) + (2 + 4 + 2)
    assert f"cluster.device.path={path}" in capsys.readouterr().out
    # Quantiles in order; which depth took longer, a busy machine decides.
    times = [(p.forward_s, p.backward_s, p.remade_s) for p in profile.stages if p.kind == "block"]
    assert times
    assert all(0 < low <= middle <= high for point in times for low, middle, high in point)
    job = ["strategy=megatron", "layout.tp=1", "layout.dp=2", "layout.pp=2", "global_batch=4", "microbatch_size=1"]
    data = ["workload=uniform", "iterations=1", "mlflow=false", f"results_dir={tmp_path}"]
    assert run_command([*simulate, *job, *data, "cluster.device.extrapolate=true"]) == 0
    (record,) = (json.loads(file.read_text()) for file in (tmp_path / "runs").rglob("*.json"))
    assert record["metrics"]["iteration_time_s"] > 0
    assert run_command(arguments) == 0
    assert len(counted) == 21
    assert read_profile(path, "x") == profile


@pytest.fixture
def bench() -> Iterator[Bench]:
    with one_of_many(small_model(), DEGREES, torch.float32, torch.device("cpu")) as built:
        yield built


def target(bench: Bench, kind: str, tp: int = 1, module: str = "llm") -> Target:
    return next(each for each in targets_of(bench.model.module(module), tp) if each.kind == kind)


@pytest.mark.wide
@pytest.mark.parametrize("module", ["vision", "audio", "llm"])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_kind_runs_as_a_shard(bench: Bench, module: str, tp: int) -> None:
    for each in targets_of(bench.model.module(module), tp):
        stages = bench.stages(each)
        points = bench.measure(each, stages, (5, 11), PATIENCE)
        assert [point.layers for point in points] == [*each.depths]
        sizes = [sum(p.numel() for p in stage.stage.parameters()) for stage in stages.values()]
        parameters = next(layer.parameters for layer in each.module.kinds if layer.kind == each.kind)
        # A shard has its part of the weights, and all of the norms and of the biases that are added after summing.
        assert parameters / tp <= sizes[0] <= 1.2 * parameters / tp
        assert sizes[-1] == sizes[0] * each.depths[-1]


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 4)])
def test_a_block_runs_with_the_tokens_of_one_context_parallel_rank(bench: Bench, tp: int, cp: int) -> None:
    seen: list[int] = []
    (block,) = targets_of(bench.model.llm, tp, cp)
    stages = bench.stages(block)
    for layer in stages[1].stage.layers.values():
        layer.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    points = bench.measure(block, stages, (16, 48), PATIENCE)
    # Of 64 tokens, and with sequence parallelism its share of these.
    assert {*seen} == {64 // cp // tp}
    assert [(point.cp, point.lengths) for point in points] == [(cp, (16, 48))] * 2


@pytest.mark.wide
def test_a_pack_that_takes_too_long_is_left_out(bench: Bench) -> None:
    block = target(bench, "block")
    assert bench.measure(block, bench.stages(block), (64,), Patience(1, 1e-9)) == []


@pytest.mark.slow
def test_communication_of_two_ranks() -> None:
    started = perf_counter()
    points = measure_collectives("cpu", 2, (4096, 1 << 20), Patience(5, 1.0))
    assert [(point.operation, point.num_bytes) for point in points] == [
        (operation, size) for operation in COLLECTIVES for size in (4096, 1 << 20)
    ]
    assert all(point.ranks == 2 for point in points)
    total = sum(point.repetitions * point.seconds[0] for point in points)
    assert 0 < total < perf_counter() - started
    assert np.all([point.seconds[2] >= point.seconds[0] > 0 for point in points])
