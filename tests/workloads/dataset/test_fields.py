"""Fields are found by the names that they commonly have; media that nothing would read are an error."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.commands.trace import TraceKeys, compose_trace
from entrain_bench_workloads.dataset.conventions import KINDS, Chosen, table_of
from entrain_bench_workloads.dataset.fields import Known, inside, sample_of
from entrain_bench_workloads.dataset.formats import FileSource
from entrain_bench_workloads.dataset.report import ScanReport
from entrain_bench_workloads.dataset.source import BadSampleError, Reason
from support.datasets import image_bytes, scan_report, video_bytes, wav_bytes, write_jsonl

ENDINGS = {"images": ".png", "audio": ".wav", "video": ".mp4"}
COUNTED = {"images": "images", "audio": "sounds", "video": "videos"}
TABLE = table_of(None)


def manifest(folder: Path, records: list[dict[str, Any]], source: str = "manifest", **options: str | None) -> Any:
    """The source that the command makes of a manifest."""
    write_jsonl(folder / "m.jsonl", records)
    given = [f"source.{key}={'null' if value is None else value}" for key, value in options.items()]
    command = compose_trace(TraceKeys(), [f"source={source}", f"source.path={folder / 'm.jsonl'}", *given], None)
    return command.scan.__self__.source  # type: ignore[attr-defined]


def report(source: Any, folder: Path) -> ScanReport:
    return scan_report(source, folder / "out.parquet")


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in (*TABLE.media[kind], *TABLE.paths)]
)
def test_every_known_name_is_found(kind: str, name: str, tmp_path: Path) -> None:
    (tmp_path / f"x{ENDINGS[kind]}").write_bytes(b"x")
    sample = sample_of({name: f"x{ENDINGS[kind]}", "text": "a"}, Chosen(), str(tmp_path))
    found = {"images": [*sample.images], "audio": [*sample.audio], "video": [*sample.video]}
    assert found == {"images": [], "audio": [], "video": []} | {kind: [tmp_path / f"x{ENDINGS[kind]}"]}
    assert (sample.texts, sample.left) == (["a"], {})


def test_a_manifest_gives_its_sounds_and_videos(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav_bytes(1.5))
    (tmp_path / "a.mp4").write_bytes(video_bytes(64, 48, 10))
    sounds = [{"audio_filepath": "a.wav", "text": "said"}, {"audio_filepath": "gone.wav", "duration": 2}]
    assert report(manifest(tmp_path, sounds), tmp_path).items == {"texts": 1, "images": 0, "sounds": 2, "videos": 0}
    videos = [{"video_path": "a.mp4", "messages": [{"content": "b"}]}]
    assert report(manifest(tmp_path, videos), tmp_path).items == {"texts": 1, "images": 0, "sounds": 0, "videos": 1}


def test_a_path_with_another_ending_and_a_length_next_to_it_is_a_sound() -> None:
    sample = sample_of({"path": "x.sph", "duration": 4}, Chosen(), "")
    assert (sample.audio, sample.seconds) == ([Known(seconds=4.0)], 4.0)
    assert sample_of({"path": "x.sph", "text": "a"}, Chosen(), "").left == {("text", "path"): 5}
    page = sample_of({"url": "https://a.org/x", "duration": 4, "text": "a"}, Chosen(), "")
    assert (page.audio, page.left) == ([], {("text", "url"): 15})
    assert sample_of({"question": "a", "answers": "[]"}, Chosen(), "").texts == ["a"]


def test_texts_that_belong_together_are_read_together(tmp_path: Path) -> None:
    records = [{"question": "ab", "answer": "c", "image": {"width": 30, "height": 20}}]
    found = report(manifest(tmp_path, records, "llava"), tmp_path)
    assert found.items == {"texts": 1, "images": 1, "sounds": 0, "videos": 0}
    assert pq.read_table(tmp_path / "out.parquet").column("text_chars").to_pylist() == [3]


def test_later_records_may_have_media_that_the_first_lack(tmp_path: Path) -> None:
    records = [{"conversations": "a"}] * 1001 + [{"conversations": "b", "image": {"width": 3, "height": 2}}]
    assert report(manifest(tmp_path, records, "llava"), tmp_path).items["images"] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_value", [str, lambda name: [name], lambda name: {"path": name, "bytes": None}])
def test_media_that_nothing_would_read_are_an_error(kind: str, as_value: Any, tmp_path: Path) -> None:
    records = [{"text": "a"}, {"text": "see x.png and y.wav", "recorded": as_value(f"clips/1{ENDINGS[kind]}")}]
    for options in ({}, {kind: "mistyped"}):
        with pytest.raises(
            UserError, match=rf"^source.{kind}=.*field recorded names some .*Set source.{kind}=recorded,"
        ):
            report(manifest(tmp_path, records, **options), tmp_path)
    found = report(manifest(tmp_path, records, **{kind: None}), tmp_path)
    assert (found.samples, found.items[COUNTED[kind]]) == (2, 0)


def test_data_without_a_known_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no field has a known name; fields: words, n. Set source.text=words "):
        report(manifest(tmp_path, [{"words": "a", "n": 4}]), tmp_path)


def test_columns_are_found_likewise(tmp_path: Path) -> None:
    images = [{"bytes": image_bytes(30, 20), "path": None}, None]
    pq.write_table(pa.table({"image": images, "caption": ["one", "two"], "n": [[0.0], [1.0]]}), tmp_path / "a.parquet")
    source = FileSource(path=str(tmp_path / "a.parquet"))
    assert report(source, tmp_path).items == {"texts": 2, "images": 1, "sounds": 0, "videos": 0}
    (tmp_path / "out.parquet").unlink()
    pq.write_table(pa.table({"text": ["a"], "shot": ["x/1.jpg"]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"^source.images=auto: finds no images, but the field shot names some"):
        report(FileSource(path=str(tmp_path / "b.parquet")), tmp_path)
    pq.write_table(pa.table({"text": ["a"], "shot": [image_bytes(30, 20)]}), tmp_path / "c.parquet")
    with pytest.raises(
        UserError, match=r"^source.images=auto: finds no images, but the field shot holds bytes \(1 of 1"
    ):
        report(FileSource(path=str(tmp_path / "c.parquet")), tmp_path)
    assert report(FileSource(path=str(tmp_path / "c.parquet"), images="shot"), tmp_path).items["images"] == 1


def test_sizes_and_lengths_may_stand_in_records(tmp_path: Path) -> None:
    records = [{"text": "a", "v": "x", "s": 4}, {"text": "a", "v": "x", "s": 5, "width": 640, "height": 360}]
    records.append({"text": "a", "images": [{"width": 1024, "height": 768}]})
    write_jsonl(tmp_path / "m.jsonl", records)
    source = FileSource(path=str(tmp_path / "m.jsonl"), text=["text"], images="images", video="v", seconds="s")
    found = report(source, tmp_path)
    rows = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert (rows["image_widths"], rows["image_heights"]) == ([[0], [640], [1024]], [[0], [360], [768]])
    assert (rows["n_images"], found.items["videos"]) == ([0, 0, 1], 2)


# Names of files.


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
    (root / "link").symlink_to(root / "a" / "x.jpg")
    for name in ("a/x.jpg", "link", str(root / "a" / "x.jpg")):
        assert inside(str(root), name).read_bytes() == b"x"


@pytest.mark.parametrize(
    "name",
    ["../secret", "a/../../secret", "/etc/passwd", "ROOT/../secret", "ROOT-other/y", "", "a\0b"],
)
def test_names_that_leave_the_root_are_refused(root: Path, name: str) -> None:
    with pytest.raises(BadSampleError) as error:
        inside(str(root), name.replace("ROOT", str(root)))
    assert error.value.reason is Reason.OUTSIDE


@pytest.mark.parametrize("target", ["secret", "data-other/y"])
def test_links_that_leave_the_root_are_refused(root: Path, target: str) -> None:
    (root / "link").symlink_to(root.parent / target)
    with pytest.raises(BadSampleError) as error:
        inside(str(root), "link")
    assert error.value.reason is Reason.OUTSIDE


def test_only_regular_files_below_a_root_are_opened(root: Path) -> None:
    os.mkfifo(root / "pipe")
    for name in ("pipe", "a", "nothing"):
        with pytest.raises(BadSampleError) as error:
            inside(str(root), name)
        assert error.value.reason is Reason.MISSING
    with pytest.raises(BadSampleError, match=r"source.root"):
        inside("", "x.jpg")
