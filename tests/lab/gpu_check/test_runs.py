"""Runs in a folder that has records of other devices, other code and earlier attempts: only their own count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from entrain_bench.lab.gpu_check import runs
from entrain_bench.lab.gpu_check.runs import CORRECTNESS
from entrain_bench.records import keys
from entrain_bench.records.records import Record, Results
from entrain_bench.run.cells import compose_cells
from support.gpu_check import check_in
from support.made_up import finished

HANGS = "took longer than 9 s"


class Played:
    """Processes that leave a record of each of their cells, as the command does: none twice.

    Attributes:
        status: of records; empty leaves none.
        lost: strategies that leave none.
        started: how many there were.
    """

    def __init__(self) -> None:
        self.status, self.lost, self.started = "ok", set[str](), 0

    def __call__(self, arguments: Sequence[str], log: Path, *_: object) -> str:
        self.started += 1
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("its last line\n")
        if not self.status:
            return HANGS
        given = [*arguments[3:]]
        (root,) = (text.partition("=")[2] for text in given if text.startswith("results_dir="))
        results = Results(Path(root))
        for cell in compose_cells(given, multirun=True):
            if cell.config.strategy["name"] not in self.lost and not results.kept(cell):
                results.write(finished(cell, self.status, "as told"), None)
        return "exit code 1" if self.status == "failed" or self.lost else ""


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    processes = Played()
    monkeypatch.setattr(runs, "run_python", processes)
    return processes


def train(folder: Path, num_devices: int) -> Record:
    job = [*CORRECTNESS, f"cluster.gpus_per_node={num_devices}"]
    return check_in(folder, "cpu", num_devices).train("all", "megatron", "megatron", job, num_devices, 9.0)


def ranks(run: Record) -> int:
    return int(run.config["harness"]["num_ranks"])


def test_the_record_of_other_devices_is_none_of_a_run_that_hangs(tmp_path: Path, played: Played) -> None:
    assert ranks(train(tmp_path, 2)) == 2
    played.status = ""
    assert train(tmp_path, 4).reason == f"{HANGS} (its last line)"


@pytest.mark.wide
@pytest.mark.usefixtures("played")
def test_a_finished_run_has_its_own_record_though_others_are_newer(tmp_path: Path) -> None:
    assert [ranks(train(tmp_path, num_devices)) for num_devices in (2, 4, 2, 4)] == [2, 4, 2, 4]


def test_the_record_of_other_code_is_none(tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks(train(tmp_path, 2)) == 2
    monkeypatch.setattr(keys, "code_version", lambda _: "other code")
    played.status = ""
    assert train(tmp_path, 2).reason == f"{HANGS} (its last line)"


def test_a_failure_before_is_not_why_a_run_has_failed_now(tmp_path: Path, played: Played) -> None:
    played.status = "failed"
    assert train(tmp_path, 2).reason == "as told"
    played.status = ""
    assert train(tmp_path, 2).reason == f"{HANGS} (its last line)"


def test_predictions_are_known_by_their_strategies(tmp_path: Path, played: Played) -> None:
    played.lost = {"fsdp"}
    job = [*CORRECTNESS, "cluster.gpus_per_node=2"]
    found = check_in(tmp_path).predict("all", job, ["megatron", "fsdp", "entrain"])
    assert found["fsdp"].reason == "exit code 1 (its last line)"
    own = {name: run.labels["strategy"] for name, run in found.items() if run.status == "ok"}
    assert own == {"megatron": "megatron", "entrain": "entrain"}


def test_what_cannot_be_composed_is_said_and_not_run(tmp_path: Path, played: Played) -> None:
    found = check_in(tmp_path).train("all", "megatron", "megatron", ["global_batchh=1"], 2, 9.0)
    assert "global_batchh" in found.reason
    assert played.started == 0
