"""A scanned trace is opened for training, and its samples are read by their names as the scan saw them."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from entrain_bench.base.errors import UserError
from entrain_bench.specs.workload import Moved
from entrain_bench_workloads.dataset import media as media_module
from entrain_bench_workloads.dataset.fields import RawSample
from entrain_bench_workloads.dataset.formats import FileSource
from entrain_bench_workloads.dataset.source import BadSampleError, Limits, Shard
from entrain_bench_workloads.trace import TraceWorkload
from support.datasets import (
    picture,
    picture_bytes,
    samples_of,
    sound_bytes,
    video_bytes,
    write_jsonl,
    write_tar,
)
from support.scanned import RULES, SOURCES, annotations, finevision, opened, scanned

LIMITS = Limits()


def read(source: FileSource, file: Shard, number: int) -> RawSample | str:
    """A sample, or the error that names what is wrong."""
    try:
        return source.record(file, number, LIMITS)
    except BadSampleError as error:
        return str(error)


@pytest.mark.parametrize("kind", SOURCES)
def test_records_are_read_in_any_order_as_they_are_scanned(kind: str, tmp_path: Path) -> None:
    source = SOURCES[kind](tmp_path / "data")
    wanted = {
        (shard.label, number): sample if isinstance(sample, RawSample) else str(sample)
        for shard in source.shards()
        for number, sample in enumerate(samples_of(source, shard, LIMITS), shard.first)
    }
    files = {file.label: file for file in source.files()}
    places = [*wanted] * 2
    np.random.default_rng(0).shuffle(places)
    for label, number in places:
        found = read(source, files[label], int(number))
        assert found == wanted[label, int(number)]
    assert len(wanted) >= 6
    with pytest.raises(BadSampleError, match=r"has no sample 99"):
        source.record(source.files()[0], 99, LIMITS)


def test_what_a_trace_lists_is_read(tmp_path: Path) -> None:
    samples, shapes = opened(scanned(finevision(tmp_path / "data"), tmp_path / "t.parquet"))
    assert len(shapes) == 18
    for sample in range(len(shapes)):
        label, _, number = shapes.name_of(sample).rpartition(":")
        seed = 9 * int(label[6]) + int(number)
        text = f"text {seed}" + "é" * int(number)
        assert samples.tokens(shapes, sample).tolist() == [*text.encode()]
        for place, item in enumerate(range(*shapes.item_offsets[sample : sample + 2].tolist())):
            rows, columns = shapes.item_grids[item].tolist()
            width, height = [(60 + 10 * seed, 90), (70, 57)][place]
            image = picture(width, height, 2 * seed + place)
            expected = np.asarray(image.resize((14 * columns, 14 * rows), Image.Resampling.BICUBIC))
            np.testing.assert_array_equal(samples.picture(shapes, item), expected[None])


def test_sounds_are_one_channel_at_16_khz_in_segments(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a.wav", sound_bytes(70.0, 440.0, 8000)), ("a.txt", b"x")])
    samples, shapes = opened(scanned(FileSource(path=str(tmp_path / "a.tar")), tmp_path / "t.parquet"))
    lengths = [len(samples.sound(shapes, item)) for item in range(shapes.num_items)]
    assert lengths == [480_000, 480_000, 160_000]
    for item in range(3):
        time = 30 * item + np.arange(lengths[item]) / 16000
        tone = 0.75 * 20000 / 2**15 * np.sin(2 * np.pi * 440 * time)
        # A filter's ends aside.
        np.testing.assert_allclose(samples.sound(shapes, item)[500:-500], tone[500:-500], atol=2e-3)


def test_frames_of_a_video_are_those_of_their_groups(tmp_path: Path) -> None:
    (tmp_path / "v.mp4").write_bytes(video_bytes(64, 48, 40, shades=True))
    write_jsonl(tmp_path / "d.jsonl", [{"text": "a", "video": "v.mp4"}])
    source = FileSource(path=str(tmp_path / "d.jsonl"), text=["text"], video="video")
    samples, shapes = opened(scanned(source, tmp_path / "t.parquet"))
    # 4 s at 2 frames a second, two of them a group.
    assert shapes.num_items == 4
    found = [samples.picture(shapes, item) for item in range(4)]
    assert {frames.shape for frames in found} == {(2, *(14 * shapes.item_grids[0]).tolist(), 3)}
    # Frame n is of shade 6 n; in the middle of eight equal parts are frames 2, 7, ...
    shades = [int(frame.mean().round()) for frames in found for frame in frames]
    np.testing.assert_allclose(shades, [6 * number for number in range(2, 40, 5)], atol=4)


def test_shortened_samples_have_the_first_tokens_and_items(tmp_path: Path) -> None:
    workload = scanned(finevision(tmp_path / "data"), tmp_path / "t.parquet")
    shorter = replace(workload, on_overlong="truncate")
    rules = replace(RULES, context_tokens=12)
    samples, shapes = shorter.samples(rules, 256, Moved()), shorter.source(rules).shapes
    whole, all_shapes = opened(workload)
    places = {all_shapes.name_of(sample): sample for sample in range(len(all_shapes))}
    shortened = 0
    for sample in range(len(shapes)):
        tokens = samples.tokens(shapes, sample)
        full = whole.tokens(all_shapes, places[shapes.name_of(sample)])
        assert tokens.tolist() == full[: len(tokens)].tolist()
        shortened += len(tokens) < len(full)
        for item in range(*shapes.item_offsets[sample : sample + 2].tolist()):
            assert samples.picture(shapes, item).shape[0] == 1
    assert shortened
    unaware = replace(samples, truncates=False)
    cut = next(
        s
        for s in range(len(shapes))
        if len(whole.tokens(all_shapes, places[shapes.name_of(s)])) > shapes.text_tokens[s]
    )
    with pytest.raises(UserError, match=r"its text has \d+ tokens, the trace says"):
        unaware.tokens(shapes, cut)


def test_it_travels_to_other_processes_without_what_it_keeps(tmp_path: Path) -> None:
    samples, shapes = opened(scanned(finevision(tmp_path / "data"), tmp_path / "t.parquet"))
    before = len(pickle.dumps(samples))
    pixels = samples.picture(shapes, 0)
    again = pickle.dumps(samples)
    assert len(again) == before < 5000
    np.testing.assert_array_equal(pickle.loads(again).picture(shapes, 0), pixels)  # noqa: S301


def test_a_sample_that_is_not_what_the_trace_says_is_named(tmp_path: Path) -> None:
    workload = scanned(annotations(tmp_path / "data", lines=False), tmp_path / "t.parquet")
    samples, shapes = opened(workload)
    folder = tmp_path / "data" / "images"
    (folder / "0.jpg").write_bytes(picture_bytes(200, 60))
    with pytest.raises(
        UserError,
        match=r"^sample data.json:0: it has changed since the scan: its item 1 is image of 56 tokens in 4 rows of 14, "
        r"the trace says image of 16 tokens in 4 rows of 4$",
    ):
        samples.picture(shapes, 0)
    whole = (folder / "1.jpg").read_bytes()
    (folder / "1.jpg").write_bytes(whole[:-40])
    with pytest.raises(UserError, match=r"^sample data.json:1: it cannot be decoded: image file is truncated"):
        samples.picture(shapes, 1)
    (folder / "2.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"^sample data.json:2: no known format: no image$"):
        samples.picture(shapes, 2)
    (folder / "3.jpg").unlink()
    (folder / "3.jpg").symlink_to("/etc/hostname")
    with pytest.raises(
        UserError, match=r"^sample data.json:3: a path that leaves the data's root: images/3.jpg: a link$"
    ):
        samples.picture(shapes, 3)


def test_stated_lengths_may_be_rounded(tmp_path: Path) -> None:
    for number, seconds in enumerate((1.04, 1.3)):
        (tmp_path / f"{number}.wav").write_bytes(sound_bytes(seconds))
    write_jsonl(tmp_path / "d.jsonl", [{"path": f"{n}.wav", "duration": 1.0, "text": "a"} for n in range(2)])
    source = FileSource(path=str(tmp_path / "d.jsonl"), text=["text"], audio="path", seconds="duration")
    samples, shapes = opened(scanned(source, tmp_path / "t.parquet"))
    assert len(samples.sound(shapes, 0)) == round(1.04 * 16000)
    with pytest.raises(UserError, match=r"^sample d.jsonl:1: .*its sound takes 1.3 s, the data states 1$"):
        samples.sound(shapes, 1)


def test_several_videos_of_a_sample_are_refused(tmp_path: Path) -> None:
    (tmp_path / "v.mp4").write_bytes(video_bytes(64, 48, 10))
    write_jsonl(tmp_path / "d.jsonl", [{"text": "a", "videos": ["v.mp4", "v.mp4"]}])
    samples, shapes = opened(scanned(FileSource(path=str(tmp_path / "d.jsonl")), tmp_path / "t.parquet"))
    with pytest.raises(
        UserError, match=r"^sample d.jsonl:0: .*several sounds or videos are not supported with harness"
    ):
        samples.picture(shapes, 0)


def test_a_shortened_video_is_decoded_as_far_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its groups are those that the whole video has."""
    (tmp_path / "v.mp4").write_bytes(video_bytes(64, 48, 40, shades=True))
    write_jsonl(tmp_path / "d.jsonl", [{"text": "a", "video": "v.mp4"}])
    source = FileSource(path=str(tmp_path / "d.jsonl"), text=["text"], video="video")
    workload = scanned(source, tmp_path / "t.parquet")
    whole, all_shapes = opened(workload)
    rules = replace(RULES, context_tokens=int(all_shapes.item_llm_tokens[0]) + 1)
    shorter = replace(workload, on_overlong="truncate")
    samples, shapes = shorter.samples(rules, 256, Moved()), shorter.source(rules).shapes
    assert (shapes.num_items, all_shapes.num_items) == (1, 4)
    made, resized = list[int](), media_module.resized

    def noting(image: Image.Image, height: int, width: int) -> Any:
        made.append(height)
        return resized(image, height, width)

    monkeypatch.setattr(media_module, "resized", noting)
    found = samples.picture(shapes, 0)
    assert len(made) == 2
    np.testing.assert_array_equal(found, whole.picture(all_shapes, 0))


def test_compressed_archives_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar.gz", [("a.txt", b"x")], "w:gz")
    samples, shapes = opened(scanned(FileSource(path=str(tmp_path / "a.tar.gz")), tmp_path / "t.parquet"))
    with pytest.raises(UserError, match=r"^sample a.tar.gz:0: .*a.tar.gz is compressed"):
        samples.tokens(shapes, 0)


OTHER_VERSION = r"^workload.path=.*: was made by another version of entrain-bench. Run entrain-bench trace again$"


def test_a_data_set_that_has_moved_is_found_by_its_sizes(tmp_path: Path) -> None:
    workload = scanned(finevision(tmp_path / "data"), tmp_path / "t.parquet")
    moved = (tmp_path / "data").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"^harness.data_path=None: the scanned data was not found"):
        opened(workload)
    for file in moved.iterdir():
        os.utime(file, (1, 1))
    samples, shapes = opened(workload, path=str(moved))
    assert len(samples.picture(shapes, 0)) == 1
    (moved / "train-1.parquet").rename(moved / "other-1.parquet")
    with pytest.raises(UserError, match=r"^harness.data_path=.*: the scanned file train-1.parquet was not found"):
        opened(workload, path=str(moved))


def test_media_that_records_name_may_move(tmp_path: Path) -> None:
    source = replace(annotations(tmp_path / "data", lines=True), root=str(tmp_path / "data"))
    workload = scanned(source, tmp_path / "t.parquet")
    (tmp_path / "media").mkdir()
    (tmp_path / "data" / "images").rename(tmp_path / "media" / "images")
    samples, shapes = opened(workload)
    with pytest.raises(UserError, match=r"^sample data.jsonl:0: a file that does not exist: images/0.jpg$"):
        samples.picture(shapes, 0)
    samples, shapes = opened(workload, root=str(tmp_path / "media"))
    assert len(samples.picture(shapes, 0)) == 1


def test_a_file_that_was_replaced_is_refused(tmp_path: Path) -> None:
    workload = scanned(finevision(tmp_path / "data"), tmp_path / "t.parquet")
    path = tmp_path / "data" / "train-0.parquet"
    os.utime(path, (1, 1))
    with pytest.raises(UserError, match=r"train-0.parquet: changed since the scan .*harness.data_path"):
        opened(workload)
    path.write_bytes((tmp_path / "data" / "train-1.parquet").read_bytes())
    with pytest.raises(UserError, match=r"changed since the scan .*: \d+, in the scan \d+"):
        opened(workload, path=str(tmp_path / "data"))


def tokenizer_file(path: Path, words: int = 10) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def test_tokens_are_those_of_the_scan_s_tokenizer(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"text": ["w3 w1", "other w9"]}])
    source = FileSource(path=str(tmp_path / "d.jsonl"), text=["text"])
    file = tokenizer_file(tmp_path / "tokenizer.json")
    workload = scanned(source, tmp_path / "t.parquet", tokenizer=str(file))
    samples, shapes = opened(workload, 10)
    assert samples.tokens(shapes, 0).tolist() == [3, 1, 0, 9]
    with pytest.raises(
        UserError, match=r"^tokenizer=.*: has ids up to 9. They must be below the model's vocab_size=9$"
    ):
        opened(workload, 9)
    moved = file.rename(tmp_path / "moved.json")
    with pytest.raises(
        UserError, match=r"^harness.data_tokenizer=None: the scan's tokenizer .*tokenizer.json was not found"
    ):
        opened(workload, 10)
    assert opened(workload, 10, tokenizer=str(moved))[0].tokens(shapes, 0).tolist() == [3, 1, 0, 9]
    with pytest.raises(UserError, match=r"differs from the scan's tokenizer"):
        opened(workload, 100, tokenizer=str(tokenizer_file(tmp_path / "other.json", 11)))


def test_traces_without_samples_are_refused(tmp_path: Path) -> None:
    source = finevision(tmp_path / "data")
    with pytest.raises(UserError, match=r"^workload.path=.*: counts characters, not tokens. .*tokenizer=bytes"):
        opened(scanned(source, tmp_path / "chars.parquet", tokenizer=None))
    workload = scanned(source, tmp_path / "t.parquet")
    with pytest.raises(
        UserError, match=r"^tokenizer=bytes: has ids up to 255. They must be below the model's vocab_size=100$"
    ):
        opened(workload, 100)
    with pytest.raises(UserError, match=r"^workload.path=chartqa_test.parquet|lists shapes only"):
        TraceWorkload(path="chartqa_test.parquet").samples(RULES, 1024, Moved())
    with pytest.raises(UserError, match=r"^workload.text: must be null with harness.data=files"):
        replace(workload, text=5).samples(RULES, 1024, Moved())
    change_scan(workload, ("source", "kind"), "HubSource")
    with pytest.raises(UserError, match=r"scanned from HubSource, whose records cannot be read one by one"):
        opened(workload)


def change_scan(workload: TraceWorkload, place: tuple[str, ...], value: object) -> None:
    """Change what a trace says of its scan; None takes it away."""
    table = pq.read_table(workload.path)
    scan = json.loads(table.schema.metadata[b"entrain_bench.scan"])
    within = scan if len(place) == 1 else scan[place[0]]
    within[place[-1]] = value
    if value is None:
        del within[place[-1]]
    pq.write_table(table.replace_schema_metadata({"entrain_bench.scan": json.dumps(scan)}), workload.path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("limits", "frames"), 5),
        (("source", "columns"), "x"),
        *(((name,), None) for name in ("source", "limits", "files", "tokenizer_version")),
    ],
)
def test_traces_of_other_versions_are_refused(place: tuple[str, ...], value: object, tmp_path: Path) -> None:
    """A setting that is not known, and one that is missing (None)."""
    workload = scanned(finevision(tmp_path / "data"), tmp_path / "t.parquet")
    change_scan(workload, place, value)
    with pytest.raises(UserError, match=OTHER_VERSION):
        opened(workload)
