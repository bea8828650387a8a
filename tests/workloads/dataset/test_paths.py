import os
from pathlib import Path

import pytest

from entrain_bench_workloads.dataset.interface import BadSampleError, Reason
from entrain_bench_workloads.dataset.paths import inside


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "x.jpg").write_bytes(b"x")
    (tmp_path / "secret").write_bytes(b"s")
    (tmp_path / "data-other").mkdir()
    (tmp_path / "data-other" / "y").write_bytes(b"y")
    return folder


def test_a_file_below_the_root_is_found(root: Path) -> None:
    assert inside(str(root), "a/x.jpg").read_bytes() == b"x"
    (root / "link").symlink_to(root / "a" / "x.jpg")
    assert inside(str(root), "link").read_bytes() == b"x"


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc/passwd", "C:\\x", "..\\secret", "", "a\0b"])
def test_names_that_leave_the_root_are_refused(root: Path, name: str) -> None:
    with pytest.raises(BadSampleError) as error:
        inside(str(root), name)
    assert error.value.reason is Reason.OUTSIDE


@pytest.mark.parametrize("target", ["secret", "data-other/y"])
def test_links_that_leave_the_root_are_refused(root: Path, target: str) -> None:
    (root / "link").symlink_to(root.parent / target)
    with pytest.raises(BadSampleError) as error:
        inside(str(root), "link")
    assert error.value.reason is Reason.OUTSIDE


def test_what_is_no_file_is_not_waited_for(root: Path) -> None:
    os.mkfifo(root / "pipe")
    for name in ("pipe", "a", "nothing"):
        with pytest.raises(BadSampleError) as error:
            inside(str(root), name)
        assert error.value.reason is Reason.MISSING


def test_without_a_root_no_file_is_opened() -> None:
    with pytest.raises(BadSampleError, match=r"source.root"):
        inside("", "x.jpg")
