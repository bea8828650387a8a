"""Files appear whole; what a killed process had begun to write is removed, what others are writing is not."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from entrain_bench.base import files
from entrain_bench.base.files import remove_partial, write_atomically
from entrain_bench.cli import run_command
from support.processes import eventually

RUN = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2"]

# A write that takes long.
WRITER = """
import os, sys, time
from pathlib import Path
from entrain_bench.base.files import write_atomically
os.fsync = lambda _: time.sleep(1000)
write_atomically(Path(sys.argv[1]), b"half")
"""


def start_writing(path: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env=environment)
    deadline = time.monotonic() + 60
    while not any(partial.stat().st_size for partial in path.parent.glob(".*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return writer


@pytest.mark.wide
def test_what_a_killed_process_was_writing_is_removed_by_the_next_run_and_nothing_else_is(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "ab"
    dead, living = start_writing(folder / "dead.json"), start_writing(tmp_path / "living.json")
    # Not of ours.
    (folder / ".hidden").touch()
    (folder / "shown.partial").touch()
    try:
        # Both are alive.
        remove_partial(tmp_path)
        assert len([*tmp_path.rglob(".*.partial")]) == 2
        dead.send_signal(signal.SIGKILL)
        dead.wait(60)
        assert run_command([*RUN, "iterations=1", "mlflow=false", f"results_dir={tmp_path}"]) == 0
        (left,) = tmp_path.rglob(".*.partial")
        assert left.name.startswith(".living.json.")
        assert sorted(path.name for path in folder.iterdir()) == [".hidden", "shown.partial"]
    finally:
        for writer in (dead, living):
            writer.kill()
            writer.wait(60)


def test_a_file_that_was_removed_before_it_could_be_locked_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, times = fcntl.flock, 0

    def lock_late(file: object, operation: int) -> None:
        nonlocal times
        if times == 0:
            times += 1
            monkeypatch.setattr(files.fcntl, "flock", lock)
            remove_partial(tmp_path)
            monkeypatch.setattr(files.fcntl, "flock", lock_late)
        lock(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(files.fcntl, "flock", lock_late)
    write_atomically(tmp_path / "new", b"whole")
    assert times == 1
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new").read_bytes() == b"whole"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o644


def test_where_locks_are_unknown_files_are_written_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    (tmp_path / ".old.abc.partial").touch()
    write_atomically(tmp_path / "new", b"whole")
    remove_partial(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".old.abc.partial", "new"]


# Makes a folder; another process goes on writing there.
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from entrain_bench.base.files import temporary_folder
LATE = 'for i in 1 2 3 4 5 6; do mkdir -p "$0"; touch "$0/late"; sleep 0.1; done'
with temporary_folder("held-", Path(sys.argv[1])) as folder:
    (folder / "inside").mkdir()
    (folder / "inside" / "file").write_text("x")
    if sys.argv[2] == "leave":
        sys.exit(3)
    subprocess.Popen(["sh", "-c", LATE, str(folder)])
    print(folder, flush=True)
    time.sleep(1000)
"""


def guards_of(folder: Path) -> list[str]:
    """Processes that wait to remove a folder: their command lines do not name it, their input does."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (entry / "cmdline").read_bytes()
            if b"IFS= read -r path" in line and str(folder) in (entry / "environ").read_text():
                found.append(entry.name)
    return found


@pytest.mark.wide
def test_a_killed_process_leaves_no_temporary_folder(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    # By what it inherits its guard is known.
    environment = os.environ | {"HELD_IN": str(place)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place), "stay"], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert holder.stdout
    folder = Path(holder.stdout.readline().strip())
    assert (folder / "inside" / "file").exists()
    assert len(guards_of(place)) == 1
    holder.kill()
    holder.wait()
    assert eventually(lambda: not guards_of(place), 20.0)
    assert not list(place.iterdir())
