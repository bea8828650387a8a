"""How many hardware queues of a GPU ranks have."""

from __future__ import annotations

import os

import pytest
import torch

from entrain_bench.base.errors import UserError
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.train import device as device_module
from entrain_bench.train.launching import launch
from entrain_bench.train.launching.launch import environment_of_ranks
from entrain_bench.train.settings import VARIABLE, check_connections, connections_unless_given
from entrain_bench.train.trainer import DistributedTrainer
from support.train.runs import DISJOINT, SETTING


@pytest.mark.parametrize("given", ["2", "8", "32"])
def test_a_number_that_is_given_stays(given: str) -> None:
    assert connections_unless_given({VARIABLE: given}) == {}
    check_connections({VARIABLE: given})


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
