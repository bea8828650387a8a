"""The folder of a check: nobody else's is touched, and what is sent has no names in it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.lab.gpu_check.__main__ import main
from entrain_bench.lab.gpu_check.folder import archive, claim
from entrain_bench.lab.gpu_check.privacy import Scrubber

SCRUBBER = Scrubber({"/home/ann": "~"}, "ann", "node7.lab")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    notes = Path("notes")
    notes.mkdir()
    (notes / "today.md").write_bytes(b"caf\xe9 in " + str(Path.home()).encode())
    before = contents(tmp_path)
    assert main(["--output", "notes", "--device", "cpu", "--steps", "environment"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == ("gpu-check: --output=notes: must be a new or empty folder, or one that an earlier check has made")
    assert contents(tmp_path) == before


def test_new_and_empty_folders_are_the_check_s_from_then_on(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "a" / "new"):
        claim(folder)
        (folder / "report.md").write_text("x")
        archive(folder, SCRUBBER)
        claim(folder)


@pytest.mark.parametrize(
    ("output", "allowed"),
    [
        ("link", "a folder, not a symbolic link"),
        ("data", "another folder: data.zip is there, and no earlier check's"),
        (".", "the name of a folder, such as results/check"),
    ],
)
def test_links_and_archives_of_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, allowed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("real").mkdir()
    Path("link").symlink_to("real")
    Path("data.zip").write_bytes(b"mine")
    with pytest.raises(UserError) as caught:
        claim(Path(output))
    assert str(caught.value) == f"--output={output}: must be {allowed}"
    assert contents(tmp_path) == {"data.zip": b"mine"}


def test_what_is_sent_has_no_names_and_the_folder_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    claim(folder)
    written = {
        "machine.json": b'{"NCCL_COMM_ID": "node7.lab:1234", "place": "/home/ann/x"}',
        "runs/dip.log": b"on node7: caf\xe9 \xff\r\n",
        "t.csv": b"host\nnode7.lab\n",
        "t.parquet": b"\xff/home/ann",
    }
    (folder / "runs").mkdir()
    for name, content in written.items():
        (folder / name).write_bytes(content)
    (tmp_path / "secret.md").write_text("not of the check")
    (folder / "secret.md").symlink_to(tmp_path / "secret.md")
    with zipfile.ZipFile(archive(folder, SCRUBBER)) as packed:
        sent = {name: packed.read(name) for name in packed.namelist()}
    assert sent == {
        "check/.gpu-check": b"",
        "check/machine.json": b'{"NCCL_COMM_ID": "host:1234", "place": "~/x"}',
        "check/runs/dip.log": b"on host: caf\xe9 \xff\r\n",
        "check/t.csv": b"host\nhost\n",
        "check/t.parquet": written["t.parquet"],
    }
    assert {name: (folder / name).read_bytes() for name in written} == written
