"""Conventions of data: what is counted, what is named as not counted, and marks that differ from the media."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.errors import UserError
from entrain_bench.commands.trace_page import page_of
from entrain_bench_workloads.dataset.errors import BadSampleError, Reason
from entrain_bench_workloads.dataset.fields import Chosen, Known, sample_of, table_of
from entrain_bench_workloads.dataset.formats import FileSource
from entrain_bench_workloads.dataset.source import Limits
from entrain_bench_workloads.trace import TraceWorkload
from support.datasets import image_bytes, scan_report, video_bytes, wav_bytes, write_jsonl, write_tar
from support.specs import rules_of

# Questions, answers and sizes of images, the same in every layout below.
ASKED = ("What is shown?", "Read the text, please.", "Is it red?")
ANSWERED = ("A cat.", "Hello world", "No, it is blue.")
SIZES = ((640, 480), (100, 50), (336, 336))
CHARS = [len(asked) + len(answered) for asked, answered in zip(ASKED, ANSWERED, strict=True)]
THREE = range(3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of three images."""
    data = tmp_path / "data"
    data.mkdir()
    for number in THREE:
        (data / f"{number}.jpg").write_bytes(image_bytes(*SIZES[number]))
    return data


def scanned(path: Path, output: Path, **options: Any) -> dict[str, list[Any]]:
    """The columns of a trace, whose scan left nothing out and found all marks."""
    report = scan_report(FileSource(path=str(path), **options), output / "t.parquet")
    assert (report.counts, report.uncounted.unmatched) == ({}, 0)
    columns: dict[str, list[Any]] = pq.read_table(output / "t.parquet").to_pydict()
    return columns


def turns(number: int, mark: str = "<image>") -> list[dict[str, Any]]:
    return [{"from": "human", "value": mark + ASKED[number]}, {"from": "gpt", "value": ANSWERED[number]}]


def messages(number: int, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    asked = [*parts, {"type": "text", "text": ASKED[number]}]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": ANSWERED[number]}]


def encoded(number: int) -> str:
    return base64.b64encode(image_bytes(*SIZES[number])).decode()


ROWS: dict[str, Any] = {
    "LLaVA": lambda n: {"image": f"{n}.jpg", "conversations": turns(n)},
    "LLaVA in a JSON text": lambda n: {"image": f"{n}.jpg", "conversations": json.dumps(turns(n))},
    "sharegpt": lambda n: {"images": [f"{n}.jpg"], "conversations": turns(n)},
    "OpenAI": lambda n: {
        "messages": messages(n, [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{encoded(n)}"}}])
    },
    "Anthropic": lambda n: {
        "messages": messages(n, [{"type": "image", "source": {"type": "base64", "data": encoded(n)}}])
    },
    "Qwen": lambda n: {"messages": messages(n, [{"type": "image", "image": f"file://./{n}.jpg".replace("./", "")}])},
    "TRL": lambda n: {"messages": messages(n, [{"type": "image"}]), "images": [f"{n}.jpg"]},
    "by number": lambda n: {"messages": messages(n, [{"type": "image", "index": 0}]), "images": [f"{n}.jpg"]},
    "processor": lambda n: {"messages": messages(n, [{"type": "image", "path": f"{n}.jpg"}])},
    "Ollama": lambda n: {
        "messages": [
            {"role": "user", "content": ASKED[n], "images": [encoded(n)]},
            {"role": "assistant", "content": ANSWERED[n]},
        ]
    },
    "ms-swift 1": lambda n: {"query": f"<img>{n}.jpg</img>{ASKED[n]}", "response": ANSWERED[n]},
    "ms-swift 2": lambda n: {"query": f"<image>{ASKED[n]}", "response": ANSWERED[n], "images": [f"{n}.jpg"]},
    "alpaca": lambda n: {"instruction": ASKED[n], "input": "", "output": ANSWERED[n], "images": [f"{n}.jpg"]},
    "pairs": lambda n: {"prompt": ASKED[n][:5], "chosen": ASKED[n][5:], "rejected": ANSWERED[n], "image": f"{n}.jpg"},
    "pairs of turns": lambda n: {"chosen": turns(n)[:1], "rejected": turns(n)[1:], "images": [f"{n}.jpg"]},
    "FineVision": lambda n: {"images": [f"{n}.jpg"], "texts": [{"user": ASKED[n], "assistant": ANSWERED[n]}]},
    "OBELICS": lambda n: {
        "images": [None, f"{n}.jpg", {"bytes": None, "path": None}],
        "texts": [ASKED[n], None, ANSWERED[n]],
    },
    "MMC4": lambda n: {"text_list": [ASKED[n], ANSWERED[n]], "image_info": [{"image_name": f"{n}.jpg"}]},
    "VQA": lambda n: {"question": ASKED[n], "answers": [ANSWERED[n]], "image": f"{n}.jpg"},
    "question and answer": lambda n: {"question": ASKED[n], "answer": ANSWERED[n], "image_path": f"{n}.jpg"},
    "verl": lambda n: {
        "prompt": [{"role": "user", "content": "<image>" + ASKED[n] + ANSWERED[n]}],
        "images": [f"{n}.jpg"],
    },
    "captions": lambda n: {"file_name": f"{n}.jpg", "text": ASKED[n] + ANSWERED[n]},
    "base64": lambda n: {"image": encoded(n), "text": ASKED[n] + ANSWERED[n]},
    "a list of turns": lambda n: [
        {"role": "user", "content": f"<img>{n}.jpg</img>{ASKED[n]}"},
        {"content": ANSWERED[n]},
    ],
}


@pytest.mark.parametrize("layout", ROWS)
def test_a_layout_gives_its_texts_and_images(layout: str, folder: Path, tmp_path: Path) -> None:
    write_jsonl(folder / "m.jsonl", [ROWS[layout](number) for number in THREE])
    found = scanned(folder / "m.jsonl", tmp_path)
    assert found["text_chars"] == CHARS
    assert found["image_widths"] == [[width] for width, _ in SIZES]


def llava(number: int) -> dict[str, Any]:
    found: dict[str, Any] = ROWS["LLaVA"](number)
    return found


def write_csv(folder: Path) -> str:
    rows = [f'{n}.jpg,{ASKED[n]!r},"{ANSWERED[n]}"'.replace("'", '"') for n in THREE]
    (folder / "m.csv").write_text("\n".join(["image,question,answer", *rows]))
    return "m.csv"


def write_tsv(folder: Path) -> str:
    rows = ["\t".join([encoded(n), ASKED[n], ANSWERED[n]]) for n in THREE]
    (folder / "m.tsv").write_text("\n".join(["image\tquestion\tanswer", *rows]))
    return "m.tsv"


def write_gzip(folder: Path) -> str:
    (folder / "m.jsonl.gz").write_bytes(gzip.compress(b"".join(json.dumps(llava(n)).encode() + b"\n" for n in THREE)))
    return "m.jsonl.gz"


def write_zst(folder: Path) -> str:
    with pa.output_stream(str(folder / "m.json.zst"), compression="zstd") as file:
        file.write(json.dumps([llava(n) for n in THREE], indent=1).encode())
    return "m.json.zst"


def write_object(folder: Path) -> str:
    (folder / "m.json").write_text(json.dumps({"version": "1", "data": [llava(n) for n in THREE]}, indent=2))
    return "m.json"


def write_arrow(folder: Path) -> str:
    rows = [{"image": {"bytes": image_bytes(*SIZES[n]), "path": None}, "text": ASKED[n] + ANSWERED[n]} for n in THREE]
    table = pa.Table.from_pylist(rows)
    (folder / "saved").mkdir()
    (folder / "saved" / "state.json").write_text("{}")
    with pa.ipc.new_stream(folder / "saved" / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    return "saved"


def write_megatron(folder: Path) -> str:
    pairs = [[(f"{n}.jpg", image_bytes(*SIZES[n])), (f"{n}.json", json.dumps(turns(n)).encode())] for n in THREE]
    write_tar(folder / "m.tar", [member for pair in pairs for member in pair])
    return "m.tar"


def write_energon(folder: Path) -> str:
    pairs = [[(f"{n}.jpg", image_bytes(*SIZES[n])), (f"{n}.json", json.dumps(llava(n)).encode())] for n in THREE]
    (folder / "e" / ".nv-meta").mkdir(parents=True)
    (folder / "e" / ".nv-meta" / "split.yaml").write_text("{}")
    write_tar(folder / "e" / "m.tar", [member for pair in pairs for member in pair])
    return "e"


def write_captions(folder: Path) -> str:
    for n in THREE:
        (folder / f"{n}.txt").write_text(ASKED[n] + ANSWERED[n])
    return ""


def write_imagefolder(folder: Path) -> str:
    write_jsonl(folder / "metadata.jsonl", [ROWS["captions"](n) for n in THREE])
    return ""


FILES = (
    *(write_csv, write_tsv, write_gzip, write_zst, write_object, write_arrow, write_megatron, write_energon),
    *(write_captions, write_imagefolder),
)


@pytest.mark.parametrize("write", FILES)
def test_a_format_gives_its_texts_and_images(write: Any, folder: Path, tmp_path: Path) -> None:
    found = scanned(folder / write(folder), tmp_path)
    assert found["text_chars"] == CHARS
    assert found["image_widths"] == [[width] for width, _ in SIZES]


@pytest.mark.parametrize("write", FILES)
def test_a_sample_of_any_format_is_read_again_by_its_number(write: Any, folder: Path) -> None:
    source = FileSource(path=str(folder / write(folder)))
    (file,) = source.files()
    assert sum(map(len, source.record(file, 1, Limits()).texts)) == CHARS[1]
    with pytest.raises(BadSampleError, match="has no sample 3"):
        source.record(file, 3, Limits())


def test_sounds_and_videos_of_parts_and_manifests(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav_bytes(1.5))
    (tmp_path / "a.mp4").write_bytes(video_bytes(64, 48, 10))
    sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav_bytes(1.5)).decode(), "format": "wav"}}
    rows = [
        {"messages": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]},
        {"messages": [{"role": "user", "content": [sound]}]},
        {"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4", "fps": 2.0}]}]},
        {"messages": [{"role": "user", "content": "<video>What?"}], "videos": ["a.mp4"]},
        # LLaVA marks videos as images.
        {"conversations": [{"from": "human", "value": "<image>\nWhat?"}], "video": "a.mp4"},
        {"audio_filepath": "a.wav", "duration": 2.5, "text": "said"},
    ]
    write_jsonl(tmp_path / "m.jsonl", rows)
    found = scanned(tmp_path / "m.jsonl", tmp_path)
    assert found["audio_seconds"] == [1.5, 1.5, None, None, None, 2.5]
    assert found["video_seconds"] == [None, None, 1.0, 1.0, 1.0, None]


def test_a_token_holds_fewer_characters_of_chinese(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "m.jsonl", [{"text": "\u4f60\u597d\uff0c" * 11 + "abcdefgh"}, {"text": "abcd"}])
    scan_report(FileSource(path=str(tmp_path / "m.jsonl")), tmp_path / "t.parquet", None)
    assert pq.read_table(tmp_path / "t.parquet").column("text_cjk").to_pylist() == [33, 0]
    shapes = TraceWorkload(path=str(tmp_path / "t.parquet")).source(rules_of("qwen25vl")).shapes
    # 33 / 1.65 + 8 / 4 and 4 / 4.
    assert shapes.text_tokens.tolist() == [22, 1]


def test_texts_next_to_turns_are_counted() -> None:
    call = [{"id": "c", "type": "function", "function": {"name": "crop", "arguments": '{"box": [1, 2]}'}}]
    tool = {"type": "function", "function": {"name": "crop"}}
    row = {
        "tools": [tool],
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": call},
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ],
    }
    sample = sample_of(row, Chosen(), "")
    assert sorted(sample.texts) == sorted([json.dumps([tool]), "Be brief.", "Hi", json.dumps(call), "done"])
    assert sample.left == {}
    history = {"instruction": "a", "input": "b", "output": "c", "system": "d", "history": [["e", "f"]]}
    assert "".join(sorted(sample_of(history, Chosen(), "").texts)) == "abcdef"


def test_one_answer_of_several_is_counted_and_the_others_are_named() -> None:
    sample = sample_of({"question": "a", "answers": ["bc", "def", "g"], "data_split": "val"}, Chosen(), "")
    assert sample.texts == ["a", "bc"]
    assert sample.left == {("text", "answers after the first"): 4, ("text", "data_split"): 3}


def test_what_is_not_counted_is_named_with_its_share(tmp_path: Path) -> None:
    rows = [
        {"text": "abcd", "note": {"of": "efgh"}, "shots": ["x.jpg", "y.jpg"]},
        {"text": "ijkl", "note": {"of": "mn"}},
    ]
    write_jsonl(tmp_path / "m.jsonl", rows)
    report = scan_report(FileSource(path=str(tmp_path / "m.jsonl"), images=None), tmp_path / "t.parquet")
    left = [(each.kind, each.name, each.rows, each.amount) for each in report.uncounted.left_fields()]
    assert left == [("images", "shots", 1, 2), ("text", "note.of", 2, 6)]
    assert report.uncounted.chars == 8
    page = page_of(tmp_path / "t.parquet", {"_target_": "a.FileSource", "path": "m"}, ["model=tiny"], report, None)
    assert "- `note.of`: 6 characters (42.9% of all text), in 2 of 2 rows" in page
    assert "- `shots`: 2 values of images, in 1 of 2 rows" in page


def marked(path: Path, wrong: int, many: int) -> FileSource:
    good = {"text": "<image>a", "images": [{"width": 3, "height": 2}]}
    write_jsonl(path / "m.jsonl", [{**good, "text": "<image><image>a"}] * wrong + [good] * (many - wrong))
    return FileSource(path=str(path / "m.jsonl"))


def test_marks_are_compared_with_media(tmp_path: Path) -> None:
    report = scan_report(marked(tmp_path, 1, 100), tmp_path / "t.parquet")
    assert (report.uncounted.unmatched, report.uncounted.example) == (1, "m.jsonl:0: 2 marks, 1 media")
    with pytest.raises(UserError, match=r"in 2 of 100 rows marks .* differ \(first: m.jsonl:0: .*source.marks=ignore$"):
        scan_report(marked(tmp_path, 2, 100), tmp_path / "u.parquet")
    source = FileSource(path=str(tmp_path / "m.jsonl"), marks="ignore")
    assert scan_report(source, tmp_path / "v.parquet").uncounted.unmatched == 0


def test_media_that_cannot_be_read_are_refused_with_their_reason(tmp_path: Path) -> None:
    for value, reason in (("https://a.org/x.jpg", Reason.URL), ("/etc/hostname", Reason.OUTSIDE)):
        with pytest.raises(BadSampleError) as error:
            sample_of({"image": value}, Chosen(), str(tmp_path))
        assert error.value.reason == reason
    with pytest.raises(BadSampleError, match=r"video: 2 of them; .* Set source.video=null source.images=video "):
        sample_of({"video": ["0.jpg", "1.jpg"]}, Chosen(), str(tmp_path))
    lists = {"images": [{"file_name": "x.jpg"}], "annotations": [{"caption": "a"}]}
    (tmp_path / "coco.json").write_text(json.dumps(lists))
    with pytest.raises(UserError, match=r"one JSON object, .* lists of records: images \(1\), annotations \(1\)"):
        scan_report(FileSource(path=str(tmp_path / "coco.json")), tmp_path / "t.parquet")


def test_a_user_s_convention_comes_first(tmp_path: Path) -> None:
    own = """
conventions:
  mine:
    when: [dialog]
    text: [dialog]
    images: [photo]
turns:
  text: [utterance]
"""
    (tmp_path / "own.yaml").write_text(own)
    chosen = Chosen(conventions=str(tmp_path / "own.yaml"))
    row = {"dialog": [{"utterance": "ab"}, {"utterance": "c"}], "photo": {"width": 3, "height": 2}, "text": "def"}
    sample = sample_of(row, chosen, "")
    assert (sample.texts, sample.images, sample.left) == (["ab", "c"], [Known(3, 2)], {("text", "text"): 3})
    (tmp_path / "own.yaml").write_text("convention: {}")
    with pytest.raises(UserError, match=r"^source.conventions=.*: convention: unknown. Must be "):
        table_of.__wrapped__(str(tmp_path / "own.yaml"))


NAMES = st.sampled_from(
    ["messages", "content", "text", "role", "note", "images", "tools", "value", "x", "answers", "type"]
)
LETTERS = st.integers(1, 9).map(lambda many: "q" * many)
VALUES = st.recursive(
    LETTERS | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_every_text_of_a_random_row_is_counted_or_named(row: dict[str, Any]) -> None:
    try:
        sample = sample_of(row, Chosen(), "/nowhere")
    except BadSampleError:
        # A name of no file.
        return
    named = sum(amount for (kind, _), amount in sample.left.items() if kind == "text")
    counted = sum(text.count("q") for text in sample.texts)
    assert counted + named >= letters(row)


def letters(value: Any, name: str = "") -> int:
    """Letters q in a value, without roles and types."""
    if isinstance(value, dict):
        return sum(letters(each, key) for key, each in value.items())
    if isinstance(value, list):
        return sum(letters(each, name) for each in value)
    return len(value) if isinstance(value, str) and name not in ("role", "type") else 0
