"""Files are data: no plan, override, folder, record or trace runs code, writes elsewhere or opens a connection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.hostile import FOREIGN, PORT

TESTS = Path(__file__).parent
PAYLOAD = "from pathlib import Path\nPath({outside!r}, 'imported').touch()\nclass Payload: pass\n"
STRATEGY = "name: evil\nplanner: {_target_: evil_strategy.Planner}\nassigner: {_target_: evil_strategy.Planner}\n"


def start(folder: Path, *arguments: str) -> tuple[str, str]:
    """Output of Python, and notes of forbidden acts; its processes can import the payload."""
    inside, evil, outside = (folder / name for name in ("inside", "evil", "outside"))
    for place in (inside, evil / "strategy" / "planner", outside):
        place.mkdir(parents=True)
    for module in ("evil_payload", "evil_strategy"):
        (evil / f"{module}.py").write_text(PAYLOAD.format(outside=str(outside)))
    (evil / "strategy" / "evil.yaml").write_text(STRATEGY)
    (evil / "strategy" / "planner" / "evil.yaml").write_text("_target_: evil_strategy.Planner\n")
    log = folder / "log"
    path = [str(TESTS / "support" / "audit"), *filter(None, sys.path), str(evil)]
    environment = os.environ | {
        "AUDIT_FOLDER": str(inside),
        "AUDIT_FOREIGN": ",".join(FOREIGN),
        "AUDIT_LOG": str(log),
        "MPLCONFIGDIR": str(inside / "matplotlib"),
        "PYTHONPATH": os.pathsep.join(path),
        "TMPDIR": str(inside),
        "XDG_CACHE_HOME": str(inside / "cache"),
    }
    done = subprocess.run(
        [sys.executable, *arguments], cwd=inside, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, log.read_text() + "".join(map(str, outside.iterdir()))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", ["4", pytest.param("40", marks=pytest.mark.wide)])
def test_hostile_inputs_do_nothing(count: str, tmp_path: Path) -> None:
    printed, noted = start(tmp_path, "-m", "support.hostile", str(tmp_path / "inside"), "0", count)
    assert printed == ""
    assert noted == ""


@pytest.mark.parametrize(
    ("code", "event"),
    [
        ("import evil_payload", "import"),
        ("open('../outside/x', 'w')", "open"),
        ("import os; os.system('true')", "os.system"),
        ("import socket; socket.socket().connect_ex(('127.0.0.1', {port}))", "socket.connect"),
        ("import pickle; pickle.loads(b'cevil_payload\\nPayload\\n.')", "pickle.find_class"),
    ],
)
def test_the_watch_sees(tmp_path: Path, code: str, event: str) -> None:
    assert event in start(tmp_path, "-c", code.format(port=PORT))[1]
