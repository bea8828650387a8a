"""What is refused before any rank starts."""

from __future__ import annotations

import pytest
import torch

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.train.device import device_of, dtype_name, dtype_on
from entrain_bench.train.trainer import DistributedTrainer
from support.train.handover import config_from_json
from support.train.runs import configuration


@pytest.mark.wide
@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (["harness.num_ranks=2"], UserError, "harness.num_ranks=2: must be 4, the ranks of cluster=tiny"),
        (["cluster=a40x64"], UserError, "harness.num_ranks=4: must be 64, the ranks of cluster=a40x64"),
        (
            ["model=mllm_9b", "workload=laion_packed"],
            IncompatibleError,
            "model=mllm_9b: has a generator .*harness=train does not",
        ),
        (["harness.dtype=float16"], UserError, "harness.dtype=float16: unknown"),
        (
            ["harness.kernels=fast"],
            UserError,
            "harness.kernels=fast: unknown .*; choices: auto, flash3, flash4, sdpa, torch",
        ),
        (["harness.on_non_finite=ignore"], UserError, "harness.on_non_finite=ignore: unknown"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides: list[str], kind: type[UserError], message: str) -> None:
    (cell,) = compose_cells(["harness=train", "model=tiny", "cluster=tiny", *overrides])
    with pytest.raises(kind, match=message):
        prepare(cell.config)


def trainer(device: str) -> DistributedTrainer:
    executor = prepare(config_from_json(configuration("model=tiny", f"harness.device={device}"))).executor
    assert isinstance(executor, DistributedTrainer)
    return executor


def test_a_gpu_for_every_rank_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"harness.device=cuda: this machine has no CUDA device"):
        device_of(trainer("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"harness.num_ranks=4: 4 ranks need 4 GPUs, but this machine has 2"):
        device_of(trainer("cuda"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of(trainer("auto")) == torch.device("cuda", 1)


def test_gpus_compute_in_bfloat16_unless_told_otherwise() -> None:
    settings = trainer("cpu")
    assert settings.dtype == "auto"
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert (dtype_on(cpu, settings.dtype), dtype_on(gpu, settings.dtype)) == (torch.float32, torch.bfloat16)
    for name in ("float32", "bfloat16"):
        assert dtype_name(dtype_on(cpu, name)) == dtype_name(dtype_on(gpu, name)) == name


def test_torchrun_must_start_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    config = config_from_json(configuration("model=tiny"))
    with pytest.raises(UserError, match=r"harness.num_ranks=4: must be 3, the ranks that torchrun started"):
        trainer("cpu").train(config, lambda _: None)
