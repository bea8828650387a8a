"""Names that do not leave the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrain_bench.lab.gpu_check.privacy import Scrubber

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
        ("node7:12:12 [0] NCCL INFO", "host:12:12 [0] NCCL INFO"),
        # As JSON has them.
        (r'"a\nnode7.lab: /data/ann\nb"', r'"a\nhost: /data/user\nb"'),
        # Words that only contain a name.
        ("planner, channel, annex, node70, node7-b", "planner, channel, annex, node70, node7-b"),
    ],
)
def test_names_are_replaced(text: str, clean: str) -> None:
    assert SCRUBBER.text(text) == clean


def test_this_machine_has_names() -> None:
    home = str(Path.home() / "secret")
    assert Scrubber.of_this_machine().text(home) == "~/secret"


def test_numbers_are_no_names() -> None:
    assert Scrubber({}, "ann", "10.0.0.7").text('{"a": 10, "b": "on 10.0.0.7"}') == '{"a": 10, "b": "on host"}'
    assert Scrubber({}, "ann", "10").text('{"a": 10}') == '{"a": 10}'
    assert Scrubber({}, "ann", "").text("node7") == "node7"
