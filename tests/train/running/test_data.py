"""Inputs in order, by whoever makes them; every strategy trains on samples of a data set like one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from entrain_bench.balancing.recomputation import recompute_all
from entrain_bench.base.errors import ExecutionError, IncompatibleError, UserError
from entrain_bench.config.tree import choices
from entrain_bench.program import Pass, recompute_chunks
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare
from entrain_bench.train.features import PatchRules, write_patches, write_windows
from entrain_bench.train.measuring import Clock
from entrain_bench.train.messages.rank_plan import plan_rank
from entrain_bench.train.modules.packing import Pack, in_stage_order
from entrain_bench.train.running import runtime as runtime_module
from entrain_bench.train.running.data import (
    Inputs,
    MadeUp,
    SampleData,
    ThreadLoader,
    check_input,
    content_of,
    load_by_workers,
)
from entrain_bench.train.running.runtime import Runtime
from entrain_bench.train.running.stages import TrainedStage
from entrain_bench_workloads.dataset.formats import FileSource
from support.builders import random_samples
from support.datasets import picture_bytes, scan_here, sound_bytes, write_finevision, write_tar
from support.processes import eventually
from support.train.parity import check, reference_of, train_reference
from support.train.ranks import RankError, run_ranks
from support.train.runs import (
    CPU,
    DISJOINT,
    ONE_RANK,
    SETTING,
    batch,
    build_here,
    config_from_json,
    configuration,
    features_of,
    program_of,
)


class Numbered:
    """Data whose inputs are numbers; notes which were begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def inputs(self, number: int) -> Inputs:
        self.begun.append(number)
        if number < 0:
            raise OSError("planted")
        return Inputs(Pack((number,)))


def test_inputs_come_in_order_and_only_so_many_ahead() -> None:
    data: Any = Numbered()
    loader = ThreadLoader(CPU, ahead=2)
    first, second = (loader.load(data, [(number,) for number in numbers]) for numbers in (range(3), range(3, 6)))
    taken = []
    for inputs in (first, second):
        for _ in range(3):
            wanted = list(range(min(len(taken) + 2, 6)))
            assert eventually(lambda wanted=wanted: data.begun == wanted, 10.0)
            # No more than that.
            time.sleep(0.01)
            assert data.begun == wanted
            taken += next(inputs).pack.lengths
        assert next(inputs, None) is None
    assert taken == list(range(6))


def test_what_making_inputs_raises_reaches_who_takes_them() -> None:
    data: Any = Numbered()
    inputs = ThreadLoader(CPU).load(data, [(0,), (-1,), (2,)])
    assert next(inputs).pack.lengths == (0,)
    with pytest.raises(OSError, match="planted"):
        next(inputs)


def test_the_thread_pins_memory_for_the_gpu_of_its_rank() -> None:
    device = torch.device("cuda", 1)
    data: Any = Numbered()
    with patch.object(torch.cuda, "set_device") as choose:
        next(ThreadLoader(device).load(data, [(0,)]))
    choose.assert_called_once_with(device)


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_make_what_ranks_would(num_workers: int) -> None:
    (cell,) = compose_cells([*SETTING, *DISJOINT])
    model = prepare(cell.config).job.model
    batch = random_samples(np.random.default_rng(0), 6)
    data = SampleData(batch, MadeUp(cell.config.seed, model.llm.config.vocab_size))
    (items,) = np.nonzero(batch.item_modality == 0)
    requests = [
        (module, stage, members, 1, True)
        for module, members in ((model.encoders[0], items), (model.llm, np.arange(6)))
        for stage in (0, 1)
    ]
    # Inputs come in the order in which they are asked for.
    for asked in (requests, requests[::-1]):
        made = list(load_by_workers(CPU, num_workers, data, asked))
        assert [repr(inputs) for inputs in made] == [repr(data.inputs(*request)) for request in asked]
    inputs = load_by_workers(CPU, num_workers, data, [requests[0], (model.llm, 0, np.array([99])), requests[1]])
    assert repr(next(inputs)) == repr(data.inputs(*requests[0]))
    with pytest.raises(ExecutionError, match=r"^a worker: IndexError: "):
        next(inputs)


FOUR_STAGES = ("model=tiny", "strategy=entrain", "layout.tp=1", "layout.pp=4", "layout.dp=1", "global_batch=16")


@pytest.mark.wide
def test_a_rank_is_given_the_data_of_its_forwards_and_told_what_they_recompute() -> None:
    setting = prepare(config_from_json(configuration(*FOUR_STAGES)))
    plain = program_of(setting)
    # Another number for every chunk, so that none is taken for another.
    remade = [np.arange(own.size).reshape(own.shape) % (own + 1) for own in recompute_all(plain).remade]
    program = recompute_chunks(plain, remade)
    data = SampleData(program.shapes, MadeUp(0, 1024))
    seen = set()
    told = set()
    for rank in range(4):
        runtime = Runtime({}, Mock(), Mock(), torch.float32, CPU, MadeUp(0, 1024), ThreadLoader(CPU).load)
        with patch.object(runtime_module.dist, "get_rank", lambda rank=rank: rank):
            work = runtime.prepare(program)
        forwards = [step for step in plan_rank(program, rank).steps if step.kind is Pass.FORWARD]
        assert len(forwards) > 4
        for step, inputs in zip(forwards, work.inputs, strict=True):
            module, stage = program.model.modules[step.place.module], step.place.stage
            members = np.array(program.view(step.action).members)
            seen.add((module.name, stage))
            told.add(inputs.pack.remade)
            assert inputs.pack.remade == remade[step.place.module][step.chunk, stage]
            pack = replace(inputs.pack, remade=0)
            if not module.is_encoder:
                wanted = data.llm_pack(members)
                assert torch.equal(pack.token_ids, wanted.token_ids)
                assert torch.equal(pack.labels, wanted.labels)
                continue
            assert pack == data.encoder_pack(members)
            features = inputs.features_on(CPU)
            assert (features is None) == bool(stage)
            if features is not None:
                one_by_one = [features_of(data, module, members[i : i + 1]) for i in range(len(members))]
                assert torch.equal(features, torch.cat(one_by_one))
    assert seen == {("vision", 0), ("vision", 1), ("llm", 0), ("llm", 1)}
    assert len(told) > 2


class Reads(TorchDispatchMode):
    """Counts the numbers of computed tensors that the host asks for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def _reads(_: int, config: str) -> int:
    setting, runtime = build_here(config)
    work = runtime.prepare(program_of(setting))
    assert sum(step.kind is Pass.FORWARD for step in work.plan.steps) > 1
    # The optimizer counts its steps in tensors on the CPU.
    with patch.object(TrainedStage, "step"), Reads() as reads:
        runtime.run(work, Clock(CPU))
    return reads.count


@pytest.mark.wide
def test_an_iteration_asks_the_device_for_the_gradient_norm_only() -> None:
    assert run_ranks(_reads, 1, configuration(*ONE_RANK)) == [1]


# Rows of one image, of two, of none; of as many sizes as rows.
SIZES = ((57, 57), (60, 130), (90, 60), (120, 84))


def scan_images(folder: Path) -> Path:
    """A trace of FineVision-like rows."""
    folder.mkdir()
    rows = []
    for number in range(12):
        sizes = [SIZES[number % 4], SIZES[(number + 1) % 4]][: (1, 2, 1, 0)[number % 4]]
        images = [picture_bytes(*size, seed=4 * number + place) for place, size in enumerate(sizes)]
        rows.append((images, ["what is it?", f"number {number} of {len(sizes)} images"]))
    write_finevision(folder / "train.parquet", rows, row_group=5)
    source = FileSource(path=str(folder / "train.parquet"), text=["texts"], images="images")
    return scan_here(source, folder / "trace.parquet")


def scan_sounds(folder: Path) -> Path:
    """A trace of an archive of sounds, images and text."""
    folder.mkdir()
    members: list[tuple[str, bytes]] = []
    for number in range(10):
        members.append((f"s{number}.txt", f"it is tone {number}".encode()))
        if number % 3:
            members.append((f"s{number}.wav", sound_bytes(0.3 + number / 20, 100.0 * number, 8000)))
        if number % 2:
            members.append((f"s{number}.png", picture_bytes(*SIZES[number % 4], seed=number)))
    write_tar(folder / "shard.tar", members)
    return scan_here(FileSource(path=str(folder / "shard.tar")), folder / "trace.parquet")


def run_of(trace: Path, *overrides: str) -> str:
    given = ("workload=trace", f"workload.path={trace}", "workload.name=small", "harness.data=files")
    return configuration("model=tiny", *given, *overrides)


def setting_of(trace: Path, *overrides: str) -> RunContext:
    return prepare(config_from_json(run_of(trace, *overrides)))


def data_of(setting: RunContext, iteration: int = 0) -> SampleData:
    content = content_of(setting.executor, setting.workload, setting.job.model, 0)
    return SampleData(batch(setting, iteration), content)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scan_images(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scan_sounds(tmp_path_factory.mktemp("data") / "sounds")


# What a strategy does not choose by itself: rigid stages have as many layers each.
DEGREES = {"megatron_rigid": ["layout.tp=2", "layout.pp=2"]}
EVERY = [[f"strategy={name}", *DEGREES.get(name, [])] for name in choices("strategy")]


def check_strategies(trace: Path, strategies: Sequence[Sequence[str]], folder: Path, *model: str) -> None:
    """Each of them trains like one process, or says why it does not run."""
    reference = reference_of(run_of(trace, *model), folder)
    cases = [(run_of(trace, *model, *overrides), "") for overrides in strategies]
    assert check(cases, reference) >= min(2, len(strategies))


@pytest.mark.wide
@pytest.mark.timeout(300)
def test_two_strategies_train_on_images_like_one_process(images: Path, tmp_path: Path) -> None:
    strategies = [
        ["strategy=entrain", "layout.tp=1", "layout.pp=2", "layout.dp=2"],
        ["strategy=hetero_colocated", "layout.tp=2"],
    ]
    check_strategies(images, strategies, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_strategy_trains_on_sounds_and_images_like_one_process(sounds: Path, tmp_path: Path) -> None:
    check_strategies(sounds, EVERY, tmp_path, "model=tiny_av")


def test_features_and_tokens_are_those_of_the_rows(images: Path) -> None:
    setting = setting_of(images)
    data = data_of(setting)
    shapes, vision = data.shapes, setting.job.model.module("vision")
    rules = PatchRules.of(1176, 14, 2, "qwen25vl_vision", "")
    seen = 0
    for sample in range(len(shapes)):
        number = int(shapes.name_of(sample).rpartition(":")[2])
        items = np.arange(*shapes.item_offsets[sample : sample + 2])
        text = f"what is it?number {number} of {len(items)} images"
        ids = data.llm_pack(np.array([sample])).token_ids
        assert ids[ids >= 0].tolist() == [*text.encode()]
        wanted = []
        for place, item in enumerate(items.tolist()):
            size = SIZES[(number + place) % 4]
            coarse = np.random.default_rng(4 * number + place).integers(0, 256, (5, 7, 3), dtype=np.uint8)
            rows, columns = shapes.item_grids[item].tolist()
            image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
            pixels = np.asarray(image.resize((14 * columns, 14 * rows), Image.Resampling.BICUBIC))
            out = np.empty((rows * columns, 1176), np.float32)
            write_patches(pixels[None], rules, out)
            wanted.append(torch.from_numpy(out))
        if len(items):
            expected = in_stage_order(vision, data.encoder_pack(items), torch.cat(wanted))
            assert torch.equal(features_of(data, vision, items), expected)
            seen += len(items)
    assert seen >= 6


def test_sounds_are_windows_of_their_frames(sounds: Path) -> None:
    setting = setting_of(sounds, "model=tiny_av")
    data = data_of(setting)
    audio = setting.job.model.module("audio")
    items = data.shapes.items_of(["audio"])
    assert len(items) > 2
    features = features_of(data, audio, items).split(data.shapes.item_encoder_tokens[items].tolist())
    for item, found in zip(items.tolist(), features, strict=True):
        expected = np.empty(tuple(found.shape), np.float32)
        write_windows(data.content.samples.sound(data.shapes, item), expected)
        np.testing.assert_array_equal(found.numpy(), expected)
        assert found.shape[1] == 768
        assert float(found.std()) > 0.1


@pytest.mark.wide
def test_a_bad_image_ends_training_with_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    whole = picture_bytes(120, 84, seed=1, kind="JPEG")
    write_finevision(folder / "train.parquet", [([whole[:-300]], ["a text"])])
    source = FileSource(path=str(folder / "train.parquet"), text=["texts"], images="images")
    trace = scan_here(source, folder / "trace.parquet")
    with pytest.raises(RankError, match=r"UserError: sample train.parquet:0: it cannot be decoded: .*truncated"):
        run_ranks(train_reference, 1, run_of(trace, "global_batch=8"), tmp_path / "reference.npz", stay=False)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["workload=synthetic"], r"^harness.data=files: workload=synthetic has shapes only. Use workload=trace"),
        (["workload.path=chartqa_test.parquet"], r"lists shapes only. harness.data=files needs"),
        (["harness.data_path=/nowhere"], r"^harness.data_path=/nowhere: the scanned data was not found"),
        (["model.modules.llm.vocab_size=200"], r"^tokenizer=bytes: has ids up to 255. .* below .*vocab_size=200$"),
        (["model.modules.vision.embed_gemms.0.k=1000"], r"^model.modules.vision: takes 1000 features per token"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(images: Path, overrides: list[str], what: str) -> None:
    given = ["workload=trace", f"workload.path={images}", "harness.data=files", *overrides]
    if "workload=synthetic" in overrides:
        given = ["harness.data=files", *overrides]
    with pytest.raises(UserError, match=what):
        data_of(prepare(config_from_json(configuration("model=tiny", *given))))


def test_an_audio_encoder_of_another_input_is_refused(sounds: Path) -> None:
    model = setting_of(sounds, "model=tiny_av").job.model
    audio = model.module("audio")
    check_input(audio, model.tokens)
    with pytest.raises(
        IncompatibleError, match=r"^model.modules.audio: harness.data=files needs 2 log-mel frames per token"
    ):
        check_input(audio, replace(model.tokens, audio_frames_per_s=25.0))


def test_made_up_features_are_of_their_item_alone_and_have_mean_0_and_variance_1() -> None:
    (cell,) = compose_cells([*SETTING, *DISJOINT])
    vision = prepare(cell.config).job.model.encoders[0]
    data, other = (SampleData(random_samples(np.random.default_rng(0), 6), MadeUp(seed, 1024)) for seed in (0, 1))
    (items,) = np.nonzero(data.shapes.item_modality == 0)
    features = features_of(data, vision, items)
    assert torch.equal(features, torch.cat([features_of(data, vision, items[i : i + 1]) for i in range(len(items))]))
    assert not torch.equal(features, features_of(other, vision, items))
    assert len(features.unique(dim=0)) == len(features)
    assert float(features.mean()) == pytest.approx(0, abs=0.05)
    assert float(features.var()) == pytest.approx(1, abs=0.05)
