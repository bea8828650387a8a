"""Settings of training and emulation, what megatron-core alone sees of torch, and what is read without torch."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare, unwatched
from entrain_bench.train.device import MODULES, device_of, prepare_platform
from entrain_bench.train.launching import environment_of_ranks
from entrain_bench.train.settings import CONNECTIONS, TrainSettings
from entrain_bench.train.trainer import DistributedTrainer
from support.train.ranks import run_ranks
from support.train.runs import config_from_json, configuration


def rates(decay: str, **changes: Any) -> list[float]:
    truth = Mock(model=Mock(generators=()), cluster=Mock(num_ranks=4))
    given = {"learning_rate": 8.0, "min_learning_rate": 2.0, "warmup_iterations": 2} | changes
    settings = TrainSettings(truth, 1.0, learning_rate_decay=decay, **given)
    return [settings.rate_at(iteration, 6) for iteration in range(8)]


def test_rates_by_hand() -> None:
    assert rates("constant") == [4, 8, 8, 8, 8, 8, 8, 8]
    assert rates("linear") == pytest.approx([4, 8, 6.5, 5, 3.5, 2, 2, 2])
    # Half a cosine from iteration 1 to 5: 5 + 3 cos(pi k / 4).
    assert rates("cosine") == pytest.approx([4, 8, 5 + 3 * 0.5**0.5, 5, 5 - 3 * 0.5**0.5, 2, 2, 2])
    assert rates("linear", warmup_iterations=0) == pytest.approx([8, 6.8, 5.6, 4.4, 3.2, 2, 2, 2])
    assert rates("cosine", warmup_iterations=0, decay_iterations=1) == [8, 2, 2, 2, 2, 2, 2, 2]


# Overrides of which the first is named, with the value that the message has.
REFUSED = {
    "train": [
        "harness.num_ranks=2",
        "harness.dtype=float16",
        "harness.on_non_finite=ignore",
        "harness.learning_rate=-1.0",
        "harness.min_learning_rate=1",
        "harness.warmup_iterations=-1",
        "harness.learning_rate_decay=sine",
        "harness.decay_iterations=5 harness.warmup_iterations=5",
        "harness.betas=[0.9]",
        "harness.betas=[0.9,1]",
        "harness.epsilon=0.0",
        "harness.weight_decay=-0.1",
    ],
    "emulate": ["harness.device=tpu", "harness.dtype=float16", "harness.num_repetitions=0", "harness.num_warm_ups=-1"],
}


@pytest.mark.wide
@pytest.mark.parametrize(("harness", "overrides"), [(name, each) for name, rows in REFUSED.items() for each in rows])
def test_settings_that_do_not_fit_are_named(harness: str, overrides: str) -> None:
    (cell,) = compose_cells([f"harness={harness}", "model=tiny", "cluster=tiny", *overrides.split()])
    with pytest.raises(UserError) as refused:
        prepare(cell.config)
    named = str(refused.value).replace(", ", ",").partition(":")[0]
    assert named == overrides.split()[0]


@pytest.mark.parametrize("harness", REFUSED)
def test_a_model_with_a_generator_is_only_simulated(harness: str) -> None:
    (cell,) = compose_cells([f"harness={harness}", "model=mllm_9b", "workload=laion_packed", "cluster=tiny"])
    with pytest.raises(IncompatibleError, match=r"^model=mllm_9b: has a generator .*\. Use harness=simulate$"):
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


def test_torchrun_must_start_as_many_ranks() -> None:
    config = config_from_json(configuration("model=tiny"))
    with (
        patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "3"}),
        pytest.raises(UserError, match=r"harness.num_ranks=4: must be 3, the ranks that torchrun started"),
    ):
        trainer("cpu").train(config, unwatched)


@pytest.mark.parametrize(("given", "number"), [({}, "32"), ({CONNECTIONS: "1"}, "1")])
def test_ranks_have_all_queues_unless_the_user_sets_a_number(given: dict[str, str], number: str) -> None:
    with patch.dict(os.environ, given, clear=True):
        with environment_of_ranks("cuda"):
            assert os.environ[CONNECTIONS] == number
        assert os.environ.get(CONNECTIONS) == given.get(CONNECTIONS)


class _OtherAdam(torch.optim.SGD):
    """Another package's, which counts its steps elsewhere."""


def _check_platform(_: int) -> None:
    optimizers = importlib.import_module("megatron.core.optimizer")
    shards = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizers.USING_PYTORCH_OPTIMIZER, optimizers.Adam = False, _OtherAdam  # type: ignore[attr-defined]
    shards.USING_TE_OPTIMIZER, shards.Adam = True, _OtherAdam  # type: ignore[attr-defined]
    plain = torch.zeros(1).type()
    prepare_platform()
    modules = [importlib.import_module(name) for name in MODULES]
    first = [module.torch for module in modules]
    prepare_platform()
    assert all(module.torch is seen for module, seen in zip(modules, first, strict=True))
    # Everyone else sees torch as it is.
    assert plain == torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype is torch.float64
    assert not shards.USING_TE_OPTIMIZER


def test_redirections_are_seen_by_megatron_alone() -> None:
    # Its changes to megatron-core end with the processes.
    run_ranks(_check_platform, 1, stay=False)


@pytest.mark.wide
def test_settings_are_checked_without_torch() -> None:
    check = "import sys, entrain_bench.train.trainer; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
