"""``entrain-bench ui`` says what is wrong before it starts a server."""

import socket
from pathlib import Path

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.commands import ui
from entrain_bench.config.grammar import Request
from entrain_bench.records.records import Results


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


def test_the_server_listens_on_this_machine_only(tmp_path: Path) -> None:
    command = ui.server_command(Results(tmp_path), 5001)
    assert command[command.index("--host") + 1] == "127.0.0.1"
