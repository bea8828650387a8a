"""Names that do not leave the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrain_bench.gpu_check.privacy import Scrubber
from entrain_bench.gpu_check.result import FAILED, Finding

SCRUBBER = Scrubber({"/home/ann": "~", "/home/ann/bench": ".", "/scratch/x": "/T"}, "ann", "node7.lab")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/home/ann/bench/tests/a.py:3", "./tests/a.py:3"),
        ("/home/ann/.cache and /home/annabel", "~/.cache and /home/annabel"),
        ("/scratch/x/pytest-of-ann/pytest-0", "/T/pytest-of-user/pytest-0"),
        ("/data/ann/file", "/data/user/file"),
        ("ann@node7.lab said", "user@host said"),
        ('hostname="node7.lab"', 'hostname="host"'),
        # Words that only contain a name.
        ("planner, channel, annex, node7.labs", "planner, channel, annex, node7.labs"),
    ],
)
def test_names_are_replaced(text: str, clean: str) -> None:
    assert SCRUBBER.everything(text) == clean


def test_files_of_text_are_cleaned_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    written = {"a.log": b"on node7.lab", "deep/b.json": b'{"node7.lab": "/home/ann"}', "c.parquet": b"\xff/home/ann"}
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
    SCRUBBER.clean(tmp_path)
    assert (tmp_path / "a.log").read_text() == "on host"
    # Its keys may be words that a machine is called.
    assert (tmp_path / "deep" / "b.json").read_text() == '{"node7.lab": "~"}'
    assert (tmp_path / "c.parquet").read_bytes() == written["c.parquet"]


def test_what_processes_printed_is_cleaned_in_findings() -> None:
    rows = [{"strategy": "dip", "reason": "cannot reach node7.lab", "seconds": 0.5}]
    found = SCRUBBER.finding(Finding(FAILED, "node7.lab is gone", {"Runs": rows}))
    assert found == Finding(
        FAILED, "host is gone", {"Runs": [{"strategy": "dip", "reason": "cannot reach host", "seconds": 0.5}]}
    )


def test_this_machine_has_names() -> None:
    home = str(Path.home() / "secret")
    assert Scrubber.of_this_machine().everything(home) == "~/secret"
