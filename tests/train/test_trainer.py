"""What is refused before any rank starts."""

from __future__ import annotations

import os

import pytest
import torch

from entrain_bench.base.errors import UserError
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.train import device as device_module
from entrain_bench.train.device import device_of, dtype_name, dtype_on
from entrain_bench.train.launching import launch
from entrain_bench.train.launching.launch import environment_of_ranks
from entrain_bench.train.settings import VARIABLE, check_connections
from entrain_bench.train.trainer import DistributedTrainer
from support.train.handover import config_from_json
from support.train.runs import DISJOINT, SETTING, configuration


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


@pytest.mark.parametrize("given", ["1", "0", "33", "-8", "many", ""])
def test_a_number_that_does_not_do_is_refused(given: str) -> None:
    with pytest.raises(UserError, match=f"{VARIABLE}={given}: must be from 2 to 32"):
        check_connections({VARIABLE: given})


def test_ranks_with_a_gpu_have_all_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    check_connections({})
    with environment_of_ranks("cuda"):
        assert os.environ[VARIABLE] == "32"
    with environment_of_ranks("cpu"):
        assert VARIABLE not in os.environ
    assert VARIABLE not in os.environ


@pytest.mark.parametrize("torchrun", [False, True])
def test_training_on_gpus_refuses_one_queue_before_anything_starts(
    torchrun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = compose_cells([*SETTING, *DISJOINT])
    trainer = prepare(cell.config).executor
    assert isinstance(trainer, DistributedTrainer)
    seen = []

    def device_of(_: object) -> torch.device:
        seen.append(os.environ.get(VARIABLE))
        return torch.device("cuda", 0)

    def started(*_: object) -> None:
        raise AssertionError("ranks started")

    monkeypatch.setattr(device_module, "device_of", device_of)
    monkeypatch.setattr(launch, "start_ranks", started)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(UserError, match=VARIABLE):
        trainer.train(cell.config, lambda _: None)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises((AssertionError, UserError), match=r"ranks (that torchrun )?started"):
        trainer.train(cell.config, lambda _: None)
    # CUDA reads it when it starts: under torchrun this process is a rank.
    assert seen == ["1", "32" if torchrun else None]
    monkeypatch.delenv(VARIABLE, raising=False)
