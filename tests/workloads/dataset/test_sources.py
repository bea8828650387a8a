import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.errors import UserError
from entrain_bench_workloads.dataset import formats, readers
from entrain_bench_workloads.dataset.fields import RawSample, Section
from entrain_bench_workloads.dataset.formats import FileSource, HubSource, Source
from entrain_bench_workloads.dataset.scan import measure
from entrain_bench_workloads.dataset.source import BadSampleError, Limits
from support.datasets import image_bytes, samples_of, video_bytes, wav_bytes, write_finevision, write_tar

LIMITS = Limits()


def records(source: Source) -> list[tuple[str, RawSample | BadSampleError]]:
    """All samples of a source, with the names that they get."""
    return [
        (f"{shard.label}:{number}", sample)
        for shard in source.shards()
        for number, sample in enumerate(samples_of(source, shard, LIMITS), shard.first)
    ]


def measured(source: Source) -> list[tuple[RawSample, dict[str, Any]]]:
    """All samples and their sizes; none is bad."""
    samples = [sample for _, sample in records(source)]
    assert all(isinstance(sample, RawSample) for sample in samples), samples
    return [(sample, measure(sample, LIMITS)) for sample in samples if isinstance(sample, RawSample)]


def chars(sample: RawSample) -> int:
    return sum(map(len, sample.texts))


def bad(source: Source) -> dict[str, str]:
    """Problems by sample."""
    return {name: str(sample) for name, sample in records(source) if isinstance(sample, BadSampleError)}


def test_shards_of_row_groups_have_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_SHARD_ROWS", 1)
    write_finevision(tmp_path / "a.parquet", [([], [str(row)]) for row in range(25)], row_group=10)
    source = FileSource(path=str(tmp_path / "*.parquet"), text="texts")
    assert [(shard.first, shard.part) for shard in source.shards()] == [(0, (0, 1)), (10, (1, 2)), (20, (2, 3))]
    names, found = zip(*records(source), strict=True)
    assert names == tuple(f"a.parquet:{row}" for row in range(25))
    assert [sample.texts[-1] for sample in found] == [str(row) for row in range(25)]


def test_other_columns(tmp_path: Path) -> None:
    rows = {
        "image": [{"bytes": image_bytes(10, 20), "path": None}, None],
        "audio": [None, {"bytes": wav_bytes(2.0), "path": "x.wav"}],
        "caption": ["four", None],
    }
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    (_, first), (_, second) = measured(FileSource(path=str(tmp_path), text="caption", images="image", audio="audio"))
    assert (first["image_widths"], first["audio_seconds"]) == ([10], [])
    assert (second["image_widths"], second["audio_seconds"]) == ([], [2.0])


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_finevision(tmp_path / "a.parquet", [([], ["x"])])
    with pytest.raises(BadSampleError, match="has no field photos; fields: images, texts"):
        records(FileSource(path=str(tmp_path), images="photos"))
    with pytest.raises(UserError, match="must be at least one of text"):
        FileSource(path=str(tmp_path), text=None, images=None, audio=None, video=None)


def test_webdataset_samples_are_those_of_its_package(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    members = [
        ("x/1.jpg", image_bytes(10, 20)),
        ("x/1.txt", b"one"),
        ("x/2.v.PNG", image_bytes(30, 20, "PNG")),
        ("x/2.json", b'{"caption": "two"}'),
        ("__meta__/1.json", b"{}"),
        ("nosuffix", b"?"),
        ("x.y/3.txt", b"three"),
        ("x/1.txt", b"again"),
    ]
    write_tar(tmp_path / "a.tar", members)
    theirs = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
    found = records(FileSource(path=str(tmp_path)))
    assert len(found) == len([*theirs])
    texts = [sample.texts for _, sample in found if isinstance(sample, RawSample)]
    assert texts == [["one"], ["two"], ["three"], ["again"]]


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_compressed_shards_say_the_same(tmp_path: Path, mode: str) -> None:
    members = [(f"{n}.{kind}", content) for n in range(3) for kind, content in pair(n)]
    suffix = mode.replace("w", "").replace(":", ".")
    write_tar(tmp_path / f"a.tar{suffix}", members, mode)
    assert [(size["image_widths"], chars(sample)) for sample, size in measured(FileSource(path=str(tmp_path)))] == [
        ([10], 0),
        ([20], 1),
        ([30], 2),
    ]


def test_media_of_plain_archives_are_places_that_only_readers_of_whole_files_limit(tmp_path: Path) -> None:
    image = image_bytes(120, 90, "WEBP")
    members = [("a.webp", image), ("a.wav", wav_bytes(2.0)), ("a.mp4", video_bytes(64, 48, 5))]
    write_tar(tmp_path / "a.tar", members)
    write_tar(tmp_path / "a.tgz", members, "w:gz")
    ((sample, sizes),) = measured(FileSource(path=str(tmp_path / "a.tar")))
    assert sample.images == [Section(tmp_path / "a.tar", 512, len(image))]
    assert [sizes] == [size for _, size in measured(FileSource(path=str(tmp_path / "a.tgz")))]
    assert measure(sample, Limits(file_bytes=len(image))) == sizes
    with pytest.raises(BadSampleError, match=f"beyond a limit: {len(image)} bytes, limits.file_bytes=100"):
        measure(sample, Limits(file_bytes=100))


def pair(number: int) -> Sequence[tuple[str, bytes]]:
    return [("jpg", image_bytes(10 * number + 10, 20)), ("txt", b"x" * number)]


def test_members_that_leave_the_root_or_come_twice_are_bad(tmp_path: Path) -> None:
    good = ("ok.txt", b"fine")
    write_tar(tmp_path / "a.tar", [("../evil.jpg", b"x"), ("/abs.txt", b"x"), good, ("ok.txt", b"twice")])
    found = bad(FileSource(path=str(tmp_path)))
    assert list(found) == ["a.tar:0", "a.tar:1", "a.tar:2"]
    assert "leaves the data's root: ../evil.jpg" in found["a.tar:0"]
    assert "two members of one name" in found["a.tar:2"]


@pytest.mark.parametrize(
    ("damage", "good", "what"),
    [
        (lambda content: content[:3000], 2, "damaged|unexpected end"),
        (lambda content: content[:2048] + b"\xff" * 512 + content[2560:], 2, "damaged at byte 2048"),
        (lambda content: b"no archive" * 200 + content[:0], 0, "invalid header|not be opened"),
        (lambda content: content[:2048] + huge_name_header() + content[2048:], 2, "empty header"),
    ],
)
def test_an_archive_is_read_as_far_as_it_goes(tmp_path: Path, damage: Any, good: int, what: str) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [(f"{number}.txt", b"text") for number in range(5)])
    path.write_bytes(damage(path.read_bytes()))
    source = FileSource(path=str(tmp_path))
    with pytest.raises(BadSampleError, match=what):
        list(samples_of(source, source.shards()[0], LIMITS))
    iterator = iter(samples_of(source, source.shards()[0], LIMITS))
    for _ in range(good - 1):
        assert isinstance(next(iterator), RawSample)


def huge_name_header() -> bytes:
    """A header that says a name of a gigabyte follows."""
    import tarfile

    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**30
    return info.tobuf(tarfile.GNU_FORMAT)


LLAVA = [
    {"id": "a", "image": "x.png", "conversations": [{"from": "human", "value": "<image>\nHi"}]},
    {"id": "b", "image": ["x.png", "x.png"], "conversations": [{"from": "gpt", "value": 'a "quoted" [text] \\'}]},
    {"id": "c", "conversations": [{"from": "gpt", "value": "text only <b>"}]},
]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("shard_records", [1, 2, 8192])
def test_llava(tmp_path: Path, indent: int | None, shard_records: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_SHARD_ROWS", shard_records)
    monkeypatch.setattr(readers, "_READ_BYTES", 7)
    (tmp_path / "x.png").write_bytes(image_bytes(30, 20, "PNG"))
    source = llava(tmp_path, json.dumps(LLAVA, indent=indent))
    assert len(source.shards()) == -(-3 // shard_records)
    assert [(chars(sample), size["image_widths"]) for sample, size in measured(source)] == [
        (2, [30]),
        (19, [30, 30]),
        (13, []),
    ]


@pytest.mark.wide
@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=5), st.recursive(st.none() | st.text() | st.integers(), st.lists))),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    read_bytes=st.integers(1, 9),
)
def test_arrays_and_lines_are_split_as_json_reads_them(
    rows: list[Any], indent: int | None, ascii_only: bool, read_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_READ_BYTES", read_bytes)
        path = Path(folder) / "a.json"
        lines = "\n\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
        for text in (json.dumps(rows, indent=indent, ensure_ascii=ascii_only), lines):
            path.write_text("\ufeff" + text, "utf-8")
            source = FileSource(path=str(path), text="x")
            found = [row for shard in source.shards() for row in source.rows(shard, LIMITS)]
            assert found == rows


def llava(folder: Path, text: str) -> FileSource:
    (folder / "d.json").write_text(text)
    return FileSource(path=str(folder / "d.json"), text=["conversations"], images="image", video="video")


@pytest.mark.parametrize(
    ("text", "good", "what"),
    [
        ('[{"conversations": "a", "image": 5}]', 0, "image: int is no content"),
        ('[{"conversations": "a", "image": "../d.json"}]', 0, "leaves the data's root"),
        ('{"conversations": "a"}\n{broken\n\n{"conversations": "b"}', 2, "no JSON"),
        ('{"conversations": "a"}\n[1]\n', 1, "no mapping"),
    ],
)
def test_bad_records_are_counted(tmp_path: Path, text: str, good: int, what: str) -> None:
    found = [sample for _, sample in records(llava(tmp_path, text))]
    assert sum(isinstance(record, RawSample) for record in found) == good
    (error,) = [str(sample) for sample in found if isinstance(sample, BadSampleError)]
    assert what in error


@pytest.mark.parametrize(
    ("text", "byte"),
    [
        ('[{"conversations": "a"}, {"conver', 23),
        ('[{"conversations": "a"}', 23),
        ('[{"conversations": "a"}, 7, {"conversations": "b"}]', 23),
        ('[[{"conversations": "a"}], [{"conversations": "b"}]]', 25),
        ('[{"conversations": "a"}] {"conversations": "b"}', 24),
        ("[" * 100_000, 0),
        ('[{"a": ' + "[" * 100_000, 0),
    ],
)
def test_an_array_that_is_damaged_is_refused(tmp_path: Path, text: str, byte: int) -> None:
    with pytest.raises(UserError, match=rf"^source.path=.*d.json: .* at byte {byte}$"):
        llava(tmp_path, text).shards()


def test_the_hub_s_library_streams_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for part in range(2):
        write_finevision(tmp_path / f"train-{part}.parquet", [([image_bytes(30, 20 + part)], ["ab"])] * 3)
    source = HubSource(path=str(tmp_path), text=["texts"], images="images")
    assert [(chars(sample), size["image_heights"]) for sample, size in measured(source)] == [(2, [20])] * 3 + [
        (2, [21])
    ] * 3
    assert len(source.shards()) == 2


def test_a_folder_of_images_is_read(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for name in ("cat", "dog"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "1.png").write_bytes(image_bytes(30, 20, "PNG"))
    source = HubSource(path=str(tmp_path), images="image")
    assert [(size["image_widths"], size["image_heights"]) for _, size in measured(source)] == [([30], [20])] * 2
    before = source.shards()
    assert source.shards() == before
    (tmp_path / "train" / "cat" / "1.png").write_bytes(image_bytes(31, 20, "PNG"))
    assert source.shards() != before


def test_no_script_of_a_data_set_is_run(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="cannot be opened"):
        HubSource(path=str(folder), text=["texts"]).shards()
    assert not (tmp_path / "ran").exists()
