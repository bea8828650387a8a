"""Fields are found by the names that they commonly have; media that nothing would read are an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.config.trace import TraceKeys, compose_trace
from entrain_bench_workloads.dataset.hub import HubSource
from entrain_bench_workloads.dataset.known import AUTO, MEDIA, SECONDS, TEXTS, recognised
from entrain_bench_workloads.dataset.parquet import ParquetSource
from entrain_bench_workloads.dataset.records import RecordSource
from entrain_bench_workloads.dataset.scan import ScanReport
from support.datasets import image_bytes, scan_report, video_bytes, wav_bytes, write_finevision, write_jsonl

DOCUMENT = (Path(__file__).parents[3] / "docs/workloads.md").read_text()
FILES = {"images": ("a.png", image_bytes(30, 20, "PNG")), "audio": ("a.wav", wav_bytes(1.5))}
ENDINGS = {"images": ".png", "audio": ".wav", "video": ".mp4"}
COUNTED = {"images": "images", "audio": "sounds", "video": "videos"}


def manifest(folder: Path, records: list[dict[str, Any]], source: str = "manifest", **options: str | None) -> Any:
    """The source that the command makes of a manifest."""
    write_jsonl(folder / "m.jsonl", records)
    given = [f"source.{key}={'null' if value is None else value}" for key, value in options.items()]
    command = compose_trace(TraceKeys(), [f"source={source}", f"source.path={folder / 'm.jsonl'}", *given], None)
    return command.scan.__self__.source  # type: ignore[attr-defined]


def report(source: Any, folder: Path) -> ScanReport:
    return scan_report(source, folder / "out.parquet")


@pytest.mark.parametrize("source", ["manifest", "llava"])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in MEDIA.items() for name in names])
def test_every_known_name_is_found(source: str, kind: str, name: str, tmp_path: Path) -> None:
    found = recognised(manifest(tmp_path, [{name: f"x{ENDINGS[kind]}", "text": "a"}] * 3, source))
    assert {each: getattr(found, each) for each in MEDIA} == {
        each: name if each == kind else names[0] for each, names in MEDIA.items()
    }
    assert list(found.text) == ["text"]


@pytest.mark.parametrize("name", ["audio_filepath", "path", "wav"])
def test_a_manifest_gives_its_sounds(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(FILES["audio"][1])
    found = report(manifest(tmp_path, [{name: "a.wav", "text": "said"}, {name: "gone.wav", "duration": 2}]), tmp_path)
    assert found.items == {"texts": 1, "images": 0, "sounds": 2, "videos": 0}
    assert found.samples == 2


def test_what_a_path_holds_is_told_by_its_endings(tmp_path: Path) -> None:
    for kind, ending in ENDINGS.items():
        found = recognised(manifest(tmp_path, [{"file_name": f"x{ending.upper()}", "caption": "a"}]))
        assert getattr(found, kind) == "file_name"
    # Of any ending, with a length beside it: a sound's.
    assert recognised(manifest(tmp_path, [{"path": "x.sph", "duration": 4}])).audio == "path"


def test_texts_that_belong_together_are_read_together(tmp_path: Path) -> None:
    records = [{"question": "ab", "answer": "c", "source": "x", "image": {"width": 30, "height": 20}}]
    found = report(manifest(tmp_path, records, "llava"), tmp_path)
    assert found.items == {"texts": 1, "images": 1, "sounds": 0, "videos": 0}
    assert pq.read_table(tmp_path / "out.parquet").column("text_chars").to_pylist() == [3]
    for group in TEXTS[:-1]:
        assert list(recognised(manifest(tmp_path, [{group[0]: "a", "answer": "b"}])).text) == [*group]


def test_later_records_may_have_what_the_first_have_not(tmp_path: Path) -> None:
    records = [{"conversations": "a"}] * 1001 + [{"conversations": "b", "image": {"width": 3, "height": 2}}]
    assert report(manifest(tmp_path, records, "llava"), tmp_path).items["images"] == 1


@pytest.mark.parametrize("kind", MEDIA)
@pytest.mark.parametrize("as_value", [str, lambda name: [name], lambda name: {"path": name, "bytes": None}])
def test_media_that_nothing_would_read_are_an_error(kind: str, as_value: Any, tmp_path: Path) -> None:
    records = [{"text": "a"}, {"text": "see x.png and y.wav", "recorded": as_value(f"clips/1{ENDINGS[kind]}")}]
    what = rf"^source.{kind}=auto: finds no {kind}, but the field recorded names some \(.*Set source.{kind}=recorded,"
    with pytest.raises(UserError, match=what):
        report(manifest(tmp_path, records), tmp_path)
    found = report(manifest(tmp_path, records, **{kind: None}), tmp_path)
    assert (found.samples, found.items[COUNTED[kind]]) == (2, 0)


def test_a_name_that_was_mistyped_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^source.images=photos: finds no images, but the field photo names some"):
        report(manifest(tmp_path, [{"text": "a", "photo": "1.jpg"}], images="photos"), tmp_path)


def test_data_without_a_known_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no field has a known name; fields: words, n. Set source.text, "):
        report(manifest(tmp_path, [{"words": "a", "n": 4}]), tmp_path)


def test_columns_are_found_likewise(tmp_path: Path) -> None:
    rows = {
        "id": [1, 2],
        "image": [{"bytes": image_bytes(30, 20), "path": None}, None],
        "caption": ["one", "two"],
        "embedding": [[0.0], [1.0]],
    }
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    source = ParquetSource(path=str(tmp_path / "a.parquet"), text=AUTO, images=AUTO, audio=AUTO, video=AUTO)
    assert report(source, tmp_path).items == {"texts": 2, "images": 1, "sounds": 0, "videos": 0}
    pq.write_table(pa.table({"text": ["a"], "shot": ["x/1.jpg"]}), tmp_path / "b.parquet")
    source = ParquetSource(path=str(tmp_path / "b.parquet"), text=AUTO, images=AUTO)
    with pytest.raises(UserError, match=r"^source.images=auto: finds no images, but the field shot names some"):
        recognised(source)


def test_finevision_s_columns_are_what_they_were(tmp_path: Path) -> None:
    write_finevision(tmp_path / "a.parquet", [([image_bytes(30, 20)], ["ab"])])
    named = ParquetSource(path=str(tmp_path), text=["texts"], images="images")
    found = recognised(ParquetSource(path=str(tmp_path), **dict.fromkeys([*MEDIA, "text", "seconds"], AUTO)))
    assert found == named
    pytest.importorskip("datasets")
    hub = recognised(HubSource(path=str(tmp_path), **dict.fromkeys([*MEDIA, "text", "seconds"], AUTO)))
    assert (hub.text, hub.images, hub.audio, hub.seconds) == (["texts"], "images", None, None)


def test_names_that_are_given_stay(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "m.jsonl", [{"a": "b", "image": "x.png"}])
    source = RecordSource(path=str(tmp_path / "m.jsonl"), text=["a"])
    assert recognised(source) is source


def test_videos_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(video_bytes(64, 48, 10))
    found = report(manifest(tmp_path, [{"video_path": "a.mp4", "messages": [{"content": "b"}]}]), tmp_path)
    assert found.items == {"texts": 1, "images": 0, "sounds": 0, "videos": 1}


def test_the_documented_names_are_those_that_are_known() -> None:
    (table,) = re.findall(r"<!-- names -->\n(.*?)<!-- end -->", DOCUMENT, re.DOTALL)
    rows = [line.split("|")[1:-1] for line in table.splitlines()[2:]]
    found = {row[0].strip().strip("`"): re.findall(r"`(\w+)`", row[1]) for row in rows}
    assert found == {
        "source.text": [name for group in TEXTS for name in group],
        **{f"source.{kind}": [*names] for kind, names in MEDIA.items()},
        "source.seconds": [*SECONDS],
    }
