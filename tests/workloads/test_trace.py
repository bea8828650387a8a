"""Shape traces: packaged ones, those of users, frames without sizes, and how many rows are taken."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.errors import UserError
from entrain_bench.config.targets import instantiate
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TokenRules
from entrain_bench.specs.workload import ListedShapes
from entrain_bench_workloads import generated
from entrain_bench_workloads.columns import num_taken, read_columns
from entrain_bench_workloads.dataset.formats import FileSource
from entrain_bench_workloads.trace import PACKAGED_TRACES, TraceWorkload

# Qwen2.5-VL with a Whisper-like audio encoder.
RULES = TokenRules(14, 2, 4, 2, 2.0, 50.0, 2, 30.0, 4.0)
TRACES = sorted(path.name for path in PACKAGED_TRACES.glob("*.parquet"))
PROBABILITIES = [0.01, 0.5, 0.9, 0.99, 1.0]
# From the traces' provenance: LLM tokens of all items of a row.
TOKEN_QUANTILES = {
    "chartqa_test_by_image": [121, 580, 720, 1372, 1856],
    "opencqa_ocr": [77, 195, 690, 1472, 7315],
    "coco_captions_val2017_by_image": [180, 345, 391, 529, 529],
    "mathvision": [36, 256, 1426, 8280, 16280],
    "sroie_receipts": [532, 1825, 16264, 16264, 16308],
    "multi_image_generated": [48, 627, 1893, 3928, 6031],
    "documents_generated": [338, 3176, 12045, 16300, 16380],
    "long_video_generated": [897, 11730, 44850, 79560, 91290],
    "nextqa_oe_by_video": [2210, 11339, 26611, 43144, 66960],
}
SECONDS_QUANTILES = [1.9, 6.5, 15.2, 22.4, 35.2]


def half_up(values: Any) -> list[int]:
    return [int(value + 0.5) for value in values]


def item_tokens(shapes: SampleShapes) -> np.ndarray:
    return np.bincount(shapes.item_sample, weights=shapes.item_llm_tokens, minlength=len(shapes))


@pytest.fixture(scope="module")
def sources() -> dict[str, ListedShapes]:
    return {Path(name).stem: TraceWorkload(path=name).source(RULES) for name in TRACES}


@pytest.mark.parametrize("name", TOKEN_QUANTILES)
def test_token_quantiles_of_the_provenance(name: str, sources: dict[str, ListedShapes]) -> None:
    assert half_up(np.quantile(item_tokens(sources[name].shapes), PROBABILITIES)) == TOKEN_QUANTILES[name]


@pytest.mark.parametrize("name", generated.TRACES)
def test_a_generated_trace_is_what_the_suite_draws(name: str) -> None:
    assert pq.read_table(PACKAGED_TRACES / f"{name}.parquet").equals(generated.table_of(name))


def test_published_means_of_generated_traces() -> None:
    pages, documents, videos, meetings = (generated.table_of(name).to_pandas() for name in generated.TRACES)
    assert pages["n_images"].mean() == pytest.approx(5.64, rel=0.03)
    assert pages["text_chars"].mean() / 4 == pytest.approx(425, rel=0.04)
    assert documents["text_chars"].mean() / 90 == pytest.approx(5.48, rel=0.02)
    sides = documents[["image_widths", "image_heights"]].map(lambda listed: listed[0]).prod(axis=1)
    assert sides.between(203_000, 58_700_000).all()
    classes = pd.cut(videos["video_seconds"], [0, 30, 60, 120, 180]).value_counts(sort=False, normalize=True)
    assert classes.tolist() == pytest.approx([0.450, 0.200, 0.180, 0.171], abs=0.025)
    assert meetings["audio_seconds"].mean() == pytest.approx(2.56, rel=0.05)


def test_speech_seconds_of_the_provenance(sources: dict[str, ListedShapes]) -> None:
    shapes = sources["librispeech"].shapes
    seconds = shapes.encoder_tokens(["audio"]) / RULES.audio_frames_per_s
    assert np.allclose(np.quantile(seconds, PROBABILITIES), SECONDS_QUANTILES, atol=0.07)
    assert shapes.num_items > len(shapes)  # utterances above 30 s are cut


@pytest.mark.parametrize("name", TRACES)
def test_fingerprint_is_the_hash_that_the_provenance_lists(name: str) -> None:
    digest = TraceWorkload(path=name).fingerprint()
    assert digest == hashlib.sha256((PACKAGED_TRACES / name).read_bytes()).hexdigest()
    assert f"{digest}  {name}" in (PACKAGED_TRACES / "PROVENANCE.md").read_text()


# The stream.


def test_an_epoch_holds_every_row_once_and_epochs_differ(sources: dict[str, ListedShapes]) -> None:
    source = sources["sroie_receipts"]
    first, second = (source.batch(epoch, 626, seed=3).sample_ids for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(626))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, source.batch(0, 626, seed=4).sample_ids)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 700), st.lists(st.integers(0, 8), min_size=1, max_size=6), st.integers(0, 9))
def test_random_access_equals_reading_in_order(num_samples: int, iterations: list[int], seed: int) -> None:
    source = TraceWorkload(path="sroie_receipts.parquet").source(RULES)
    in_order = source.batch(0, 9 * num_samples, seed).sample_ids
    for iteration in iterations:
        ids = source.batch(iteration, num_samples, seed).sample_ids
        assert np.array_equal(ids, in_order[iteration * num_samples : (iteration + 1) * num_samples])


def test_stream_is_the_same_on_every_machine(sources: dict[str, ListedShapes]) -> None:
    # Recorded once: a change here changes every stream, and so every result.
    assert sources["chartqa_test"].batch(0, 5, seed=0).sample_ids.tolist() == [2134, 1913, 747, 2282, 1020]


# Files of users.

WRONG_SECONDS = (float("nan"), -1.0, float("inf"), 90_000)
ONE_IMAGE = {"image_widths": [[9]], "image_heights": [[9]]}


def write(path: Path, **columns: Any) -> TraceWorkload:
    pq.write_table(pa.table(columns), path / "mine.parquet")
    return TraceWorkload(path=str(path / "mine.parquet"))


def rows(shapes: SampleShapes) -> list[list[tuple[str, int]]]:
    items = list(zip(shapes.item_modality, shapes.item_llm_tokens, strict=True))
    named = [(shapes.modalities[modality], int(tokens)) for modality, tokens in items]
    return [named[lo:hi] for lo, hi in zip(shapes.item_offsets[:-1], shapes.item_offsets[1:], strict=True)]


def test_every_column_of_a_mixed_trace(tmp_path: Path) -> None:
    workload = write(
        tmp_path,
        sample_id=[7, 8, 9, 10],
        n_images=pa.array([2, 1, None, 0]),
        image_widths=[[56, 84], [56, 640], None, []],
        image_heights=pa.array([[56, 56], [56, 360], None, []], pa.large_list(pa.float32())),
        audio_seconds=pa.array([None, None, 31.0, None]),
        video_seconds=pa.array([None, 2.0, None, None]),
        text_tokens=[3, 0, 0, 11],
        text_chars=[999] * 4,
        unrelated=["a"] * 4,
    )
    shapes = workload.source(RULES).shapes
    assert shapes.sample_ids.tolist() == [7, 8, 9, 10]
    assert shapes.text_tokens.tolist() == [3, 0, 0, 11]
    video = [("image", 4), ("video", 299), ("video", 299)]
    assert rows(shapes) == [[("image", 4), ("image", 6)], video, [("audio", 750), ("audio", 25)], []]


def test_rows_with_several_sounds_and_videos(tmp_path: Path) -> None:
    workload = write(
        tmp_path,
        text_tokens=[3, 4, 5],
        image_widths=[[84, 56, 640], [640], []],
        image_heights=[[56, 56, 360], [360], []],
        audio_seconds=[[], [31.0, 2.0], None],
        video_seconds=[[2.0, 1.0], [1.0], []],
    )
    # A second is an item; a frame of 56 x 56 becomes 12 x 12 LLM tokens, of which 128 are the least.
    small, large = ("video", 144), ("video", 299)
    sounds = [("audio", 750), ("audio", 25), ("audio", 50)]
    assert rows(workload.source(RULES).shapes) == [[("image", 6), small, small, large], [large, *sounds], []]


def test_text_alone_is_a_trace_and_ids_default_to_rows(tmp_path: Path) -> None:
    shapes = write(tmp_path, text_chars=[8, 9], audio_seconds=pa.nulls(2)).source(RULES).shapes
    assert shapes.text_tokens.tolist() == [2, 3]
    assert shapes.sample_ids.tolist() == [0, 1]
    assert shapes.num_items == 0


def test_texts_may_be_drawn_for_the_same_images() -> None:
    text = {
        "kind": "mixture",
        "weights": [1, 3],
        "components": [100, {"kind": "lognormal", "median": 30, "sigma": 0.1}],
    }
    coco = "coco_captions_val2017_by_image.parquet"
    plain, drawn = (TraceWorkload(path=coco, text=each).source(RULES).shapes for each in (None, text))
    assert np.array_equal(plain.item_llm_tokens, drawn.item_llm_tokens)
    assert np.mean(drawn.text_tokens == 100) == pytest.approx(0.25, abs=0.02)
    assert np.median(drawn.text_tokens[drawn.text_tokens < 100]) == 30
    # Independent of the images, and of the order in which the stream takes the rows.
    assert abs(np.corrcoef(drawn.text_tokens, drawn.item_llm_tokens)[0, 1]) < 0.05
    assert np.array_equal(TraceWorkload(path=coco, text=text).source(RULES).shapes.text_tokens, drawn.text_tokens)
    assert TraceWorkload(path=coco, text=7).source(RULES).shapes.text_tokens.tolist() == [7] * 5000
    with pytest.raises(UserError, match=r"workload\.text\.kind=normal: unknown"):
        TraceWorkload(path=coco, text={"kind": "normal"})


def test_working_directory_and_packaged_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text_chars": [4]}), "coco.parquet")
    pq.write_table(pa.table({"text_chars": [4]}), "mathvision.parquet")
    assert len(TraceWorkload(path="coco.parquet").source(RULES).shapes) == 1
    assert len(TraceWorkload(path="mathvision.parquet").source(RULES).shapes) == 3040
    assert len(TraceWorkload(path="./mathvision.parquet").source(RULES).shapes) == 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text_chars": []}, "has no rows"),
        ({"image_widths": [[1]], "image_heights": [[1]]}, "needs a column text_tokens or text_chars"),
        ({"text_chars": [1, -3]}, r"row 2, column text_chars: -3\.0; must be a whole number from 0"),
        ({"text_chars": [1, None]}, "row 2, column text_chars: nan"),
        ({"text_chars": [1.5]}, r"row 1, column text_chars: 1\.5; must be a whole number"),
        ({"text_chars": ["9"]}, "column text_chars: holds string; must be numbers"),
        ({"text_chars": [1], "image_widths": [[5]]}, "row 1, column image_heights: 0; must be as many entries"),
        ({"text_chars": [1], "image_widths": [[5]], "image_height": [[5]]}, "column image_height: unknown"),
        ({"text_chars": [1], "image_widths": [5], "image_heights": [5]}, "column image_widths: has type int64"),
        (
            {"text_chars": [1, 1], "image_widths": [[5], [5, 6]], "image_heights": [[5], [5]]},
            "row 2, column image_heights",
        ),
        ({"text_chars": [1, 1], "image_widths": [[5, 5], []], "image_heights": [[5, -2], []]}, "row 1, column image_h"),
        ({"text_chars": [1], "image_widths": [[float("nan")]], "image_heights": [[5.0]]}, "column image_widths: nan"),
        ({"text_chars": [1], "image_widths": [[1]], "image_heights": [[201]]}, "must be sides within"),
        ({"text_chars": [1, 1], "audio_seconds": [1.0, 0.0]}, r"row 2, column audio_seconds: 0\.0; must be a number"),
        *(({"text_chars": [1], "audio_seconds": [wrong]}, "row 1, column audio_seconds") for wrong in WRONG_SECONDS),
        ({"text_chars": [1], "video_seconds": [1.0]}, "row 1, column image_widths: 0; must be the size of the frames"),
        ({"text_chars": [1, 1], "audio_seconds": [[], [1.0, 0.0]]}, r"row 2, column audio_seconds: 0\.0; must be"),
        ({"text_chars": [1], "video_seconds": [[1.0, 2.0]], **ONE_IMAGE}, "row 1, column image_widths: 1; must be the"),
        ({"text_chars": [1], "n_images": [1], "video_seconds": [1.0], **ONE_IMAGE}, r"row 1, column n_images: 1\.0"),
        ({"text_chars": [4, 0]}, r"row 2, column text_chars: 0\.0; must be positive in a row without images"),
        ({"text_chars": [4], "sample_id": [0.5]}, "column sample_id: has type double; must be integers or strings"),
        ({"text_chars": [4, 4], "sample_id": ["a", None]}, "row 2, column sample_id: null"),
        (
            {"text_chars": [4] * 3, "sample_id": ["b", "a", "a"]},
            "row 3, column sample_id: a; must be unique, but row 2",
        ),
        (
            {"text_chars": [4], "sample_id": pa.array([2**64 - 1], pa.uint64())},
            "row 1, column sample_id: 18446744073709",
        ),
    ],
)
def test_errors_name_file_row_and_column(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    workload = write(tmp_path, **columns)
    with pytest.raises(UserError, match=message) as caught:
        workload.source(RULES)
    assert str(caught.value).startswith(f"workload.path={tmp_path}/mine.parquet: ")
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.parquet"
    workload = TraceWorkload(path=str(path))
    with pytest.raises(UserError, match=r"does not exist\. Must be a Parquet file"):
        workload.source(RULES)
    with pytest.raises(UserError, match="does not exist"):
        workload.fingerprint()
    with pytest.raises(UserError, match="is not a file"):
        TraceWorkload(path=str(tmp_path)).source(RULES)
    whole = (PACKAGED_TRACES / "librispeech.parquet").read_bytes()
    middle = len(whole) // 2
    for content in (b"", b"not Parquet at all", whole[:-9], whole[:middle] + bytes(4096) + whole[middle + 4096 :]):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is not a readable Parquet file") as caught:
            workload.source(RULES)
        assert "\n" not in str(caught.value)


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"text_tokens": [7, 8], "sample_id": ["first", "second"], "spare": [1, 2]}), path)
    whole = path.read_bytes()
    TraceWorkload(path=str(path)).source(RULES)
    for text, damaged in ((b"first", b"fir\xf9t"), (b"spare", b"sp\xf9re")):
        path.write_bytes(whole.replace(text, damaged))
        with pytest.raises(UserError, match="is not a readable Parquet file"):
            TraceWorkload(path=str(path)).source(RULES)


def configured(**values: Any) -> TraceWorkload:
    """A workload of a YAML, whose values are checked."""
    target = "entrain_bench_workloads.trace.TraceWorkload"
    made = instantiate({"_target_": target, **values}, "workload", "source")
    assert isinstance(made, TraceWorkload)
    return made


def test_limits_in_the_wrong_order() -> None:
    with pytest.raises(UserError, match="max_video_frame_tokens=100: must be at least min_video_frame_tokens=128"):
        TraceWorkload(path="mathvision.parquet", max_video_frame_tokens=100)
    with pytest.raises(UserError, match=r"max_image_tokens=3: must be at least model\.tokens\.min_image_tokens=4"):
        TraceWorkload(path="mathvision.parquet", max_image_tokens=3).source(RULES)


FRAME = (640.0, 360.0)


def trace(folder: Path, **columns: Any) -> Path:
    path = folder / "t.parquet"
    pd.DataFrame({"text_tokens": [5] * len(columns["video_seconds"]), **columns}).to_parquet(path)
    return path


def test_zeros_and_missing_entries_are_filled_and_others_stay(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        video_seconds=[4.0, 4.0, 4.0, None, 4.0],
        image_widths=[[100, 0], [100, 320], [], [50], [30]],
        image_heights=[[90, 0], [90, 240], [], [60], [40]],
        n_images=[1, 1, 0, 1, 1],
    )
    found = read_columns(path, frame_size=FRAME)
    assert found.num_images.tolist() == [1, 1, 0, 1, 1]
    assert found.image_widths.tolist() == [100, 100, 50, 30]
    assert found.frame_widths.tolist() == [640, 320, 640, 640]
    assert found.frame_heights.tolist() == [360, 240, 360, 360]


def test_without_any_sizes_all_frames_have_it(tmp_path: Path) -> None:
    path = trace(tmp_path, video_seconds=[4.0, None, 2.0])
    found = read_columns(path, frame_size=FRAME)
    assert found.frame_widths.tolist() == [640, 640]
    shapes = TraceWorkload(path=str(path), frame_size=[640, 360]).source(RULES).shapes
    # 640 x 360 is 23 x 13 cells of 28 pixels; 2 frames a second, 2 a group.
    assert shapes.item_llm_tokens.tolist() == [23 * 13] * 6
    np.testing.assert_array_equal(np.diff(shapes.item_offsets), [4, 0, 2])


def test_without_the_flag_the_row_is_named_and_the_flag(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"row 1, .*workload.frame_size=\[640,360\]"):
        read_columns(trace(tmp_path, video_seconds=[4.0]))
    zero = trace(tmp_path, video_seconds=[4.0], image_widths=[[0]], image_heights=[[0]])
    with pytest.raises(UserError, match=r"row 1, column image_widths: 0.0; .*workload.frame_size"):
        read_columns(zero)
    # An image has no size of frames.
    image = trace(tmp_path, video_seconds=[4.0], image_widths=[[0, 9]], image_heights=[[9, 9]])
    with pytest.raises(UserError, match=r"row 1, column image_widths: 0.0"):
        read_columns(image, frame_size=FRAME)


@pytest.mark.parametrize("size", [[640], [640, 0], [640.5, 360], [1, 500], [True, 1]])
def test_bad_sizes_are_one_line(size: list[Any]) -> None:
    with pytest.raises(UserError, match=r"workload.frame_size.*must be (\[width, height\]|an integer)"):
        configured(path="x.parquet", frame_size=size)


@pytest.mark.parametrize(
    ("text", "of_ten", "of_three"),
    [("all", 10, 3), ("first:4", 4, 3), ("first:50%", 5, 2), ("first:1%", 1, 1)],
)
def test_shares_and_numbers(text: str, of_ten: int, of_three: int) -> None:
    assert [num_taken(text, total) for total in (10, 3, 0)] == [of_ten, of_three, 0]


@pytest.mark.parametrize(
    "text", ["", "first", "first:0", "first:-1", "first:1.5", "first:101%", "first:0%", "last:3", "10%"]
)
def test_others_are_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"workload.take=.*must be"):
        configured(path="x.parquet", take=text)


def test_a_trace_gives_its_first_rows_whatever_its_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pd.DataFrame({"text_tokens": range(1, 11)}).to_parquet(path, row_group_size=3)
    assert pq.read_metadata(path).num_row_groups == 4
    for take, count in (("first:4", 4), ("first:60%", 6), ("all", 10)):
        shapes = TraceWorkload(path=str(path), take=take).source(RULES).shapes
        assert shapes.text_tokens.tolist() == list(range(1, count + 1))


def test_files_are_taken_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b/2.parquet", "a/1.parquet", "c.parquet", "a/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = FileSource(path=str(tmp_path), take="first:2").files()
    assert [file.label for file in found] == ["a/1.parquet", "b/2.parquet"]
    everything = FileSource(path=str(tmp_path / "**" / "*.parquet")).files()
    assert [file.label for file in everything] == ["a/1.parquet", "b/2.parquet", "c.parquet"]
    with pytest.raises(UserError, match=r"source.path=.*does not exist$"):
        FileSource(path=str(tmp_path / "*.tar")).files()
    with pytest.raises(UserError, match=r"source.path=.*x.txt: must be .parquet, .* files$"):
        FileSource(path=str(tmp_path / "a" / "x.txt")).files()
