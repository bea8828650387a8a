"""The verbs ``claims``, ``ledger`` and ``ui``."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.answers.documents.claim import load_claims
from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.commands import ui
from entrain_bench.config.comments import groups
from entrain_bench.config.constants import read_draws
from entrain_bench.config.grammar import Request
from entrain_bench.lab.ledger import fit
from entrain_bench.lab.ledger.jobs import Book
from entrain_bench.records.records import Results
from support.ledger import STATED
from support.servers import free_port


@pytest.mark.wide
def test_a_line_per_claim_then_counts_and_mismatches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["claims", f"results_dir={tmp_path}"]) == 0
    *lines, counts, mismatches = capsys.readouterr().out.splitlines()
    claims = load_claims()
    assert counts.startswith(f"{len(claims)} claims: as published ")
    assert mismatches.startswith(f"0 mismatches between {len(claims)} claims and ")
    assert sum(line.startswith("  ") for line in lines) == len(claims)
    assert sum("| equal tuning " in line for line in lines) == sum("fair" in claim.settings for claim in claims)
    assert any(line.startswith("Entrain, ") for line in lines)


def write(path: Path, **changes: str) -> Path:
    values = {**STATED, **changes}
    path.write_text(",".join(values) + "\n" + ",".join(values.values()) + "\n")
    return path


def test_own_measurements_are_predicted_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "mine.csv", step_time_s="9.1", peak_memory_gib="40")
    assert run_command(["ledger", f"ledger={path}", f"results_dir={tmp_path}"]) == 0
    (line,) = pd.read_csv(tmp_path / "ledger.csv").to_dict("records")
    assert (line["source"], line["row"], line["status"]) == ("mine", 2, "predicted")
    assert line["predicted_s"] / line["published_s"] == pytest.approx(line["ratio"], rel=1e-4)
    assert "median ratio" in capsys.readouterr().out


def test_a_fit_prints_constants_and_writes_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Book, "tables", property(lambda _: ()))
    monkeypatch.setattr(fit, "plan_forwards", lambda _: ())
    monkeypatch.setattr(fit, "read_kernels", lambda _: ())
    path = write(tmp_path / "mine.csv")
    drawn = tmp_path / "posterior.csv"
    assert run_command(["ledger", f"ledger={path}", f"results_dir={tmp_path}", f"posterior={drawn}"]) == 0
    said = capsys.readouterr().out
    assert "Fitted constants" in said
    assert "device.sustained_fraction" in said
    assert "Each source left out of the fit: Sources" in said
    # Devices whose constants are taken over from the fitted one have its draws, twice as wide.
    devices = ("A100-SXM-80GB", "A800-SXM-80GB", "L40S", "MI300X", "RTX-4090", "RTX-6000-Ada")
    assert {device: len(draws) for device, draws in read_draws(drawn).items()} == dict.fromkeys(devices, 50)


@pytest.fixture(autouse=True)
def _some_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "links", lambda *_: ["a link"])


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port={port}: must be free"):
            ui.main(Request(ui.Keys(str(tmp_path), port)))


def test_notes_of_the_server_are_left_out_and_errors_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "import sys, warnings; print('a note'); warnings.warn('old'); print('broken', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(ui, "server_command", lambda *_: [sys.executable, "-c", said])
    assert ui.main(Request(ui.Keys(str(tmp_path), free_port()))) == 3
    shown = capfd.readouterr()
    assert shown.out == "a link\n"
    assert shown.err.splitlines()[1:] == ["broken"]


def test_the_server_listens_on_this_machine_only(tmp_path: Path) -> None:
    command = ui.server_command(Results(tmp_path), 5001)
    assert command[command.index("--host") + 1] == "127.0.0.1"


def test_ls_lists_every_choice_and_refuses_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    for table, group in (("models", "model"), ("workloads", "workload"), ("strategies", "strategy")):
        assert run_command(["ls", table]) == 0
        shown = {line.split(maxsplit=1)[0] for line in capsys.readouterr().out.splitlines()}
        assert {*groups()[group]} <= shown
    for words, message in (
        ([], "ls: takes one word; choices: "),
        (["model"], "ls=model: unknown (did you mean models?)"),
    ):
        assert run_command(["ls", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.wide
def test_ls_clusters_states_gpus_and_origin_of_constants(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["ls", "clusters"]) == 0
    rows = {cells[0]: cells[1:4] for line in capsys.readouterr().out.splitlines() if (cells := line.split())[3:]}
    assert rows["h100x64"] == ["64", "H100-SXM", "fitted"]
    assert rows["gb200x72"] == ["72", "GB200", "derived"]
