"""Data sets in the layouts and formats that people have, made from scratch: their sizes come out, or an error."""

import base64
import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench_workloads.columns import read_columns
from entrain_bench_workloads.dataset.formats import FileSource
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
    assert (report.counts, report.unmatched) == ({}, 0)
    columns: dict[str, list[Any]] = pq.read_table(output / "t.parquet").to_pydict()
    return columns


def turns(number: int, cut: int = 0) -> list[dict[str, Any]]:
    asked = {"from": "human", "value": "<image>" + ASKED[number][cut:]}
    return [asked, {"from": "gpt", "value": ANSWERED[number]}]


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
    "a system": lambda n: {"system": ASKED[n][:4], "conversations": turns(n, cut=4), "images": [f"{n}.jpg"]},
    "a system as a turn": lambda n: {
        "messages": [
            {"role": "system", "content": ASKED[n][:4]},
            {"role": "user", "content": ASKED[n][4:] + "<image>"},
            {"role": "assistant", "content": ANSWERED[n]},
        ],
        "images": [f"{n}.jpg"],
    },
    "a history": lambda n: {
        "instruction": ASKED[n][4:],
        "output": ANSWERED[n][2:],
        "history": [[ASKED[n][:4], ANSWERED[n][:2]]],
        "image": f"{n}.jpg",
    },
    "rankings": lambda n: {
        "conversations": turns(n)[:1],
        "chosen": {"from": "gpt", "value": ANSWERED[n][:2]},
        "rejected": {"from": "gpt", "value": ANSWERED[n][2:]},
        "images": [f"{n}.jpg"],
    },
    "a rejected response": lambda n: {
        "messages": [{"role": "user", "content": ASKED[n] + "<image>"}],
        "rejected_response": ANSWERED[n],
        "images": [f"{n}.jpg"],
    },
    "completions": lambda n: {"prompt": ASKED[n], "completion": ANSWERED[n], "image": f"{n}.jpg"},
    "completions of turns": lambda n: {
        "prompt": [{"role": "user", "content": ASKED[n]}],
        "completion": [{"role": "assistant", "content": ANSWERED[n]}],
        "label": True,
        "images": [f"{n}.jpg"],
    },
    "OpenAI's responses": lambda n: {
        "messages": [
            {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{encoded(n)}"}]},
            {"role": "user", "content": [{"type": "input_text", "text": ASKED[n] + ANSWERED[n]}]},
        ]
    },
    "Mantis": lambda n: {
        "images": [{"bytes": None, "path": f"{n}.jpg"}],
        "conversation": [{"role": "user", "content": "<image>" + ASKED[n]}, {"role": "gpt", "content": ANSWERED[n]}],
    },
    "Cauldron": lambda n: {
        "images": [f"{n}.jpg"],
        "texts": [{"user": ASKED[n], "assistant": ANSWERED[n], "source": "x"}],
    },
    "InternVL": lambda n: {"image": [f"{n}.jpg"], "width": 1, "height": 1, "conversations": turns(n)},
    "sizes alone": lambda n: {
        "text": ASKED[n] + ANSWERED[n],
        "images": [dict(zip(("width", "height"), SIZES[n], strict=True))],
    },
    "several captions": lambda n: {"image": f"{n}.jpg", "captions": [ASKED[n] + ANSWERED[n], "another"]},
    "LAION": lambda n: {"TEXT": ASKED[n] + ANSWERED[n], "image": f"{n}.jpg"},
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


def write_kohya(folder: Path) -> str:
    (folder / "train" / "10_cat").mkdir(parents=True)
    for n in THREE:
        (folder / f"{n}.jpg").rename(folder / "train" / "10_cat" / f"{n}.jpg")
        (folder / "train" / "10_cat" / f"{n}.caption").write_text(ASKED[n] + ANSWERED[n])
    return "train"


def write_kohya_metadata(folder: Path) -> str:
    (folder / "meta_cap.json").write_text(json.dumps({f"{n}.jpg": {"caption": ASKED[n] + ANSWERED[n]} for n in THREE}))
    return "meta_cap.json"


def write_keyed(folder: Path) -> str:
    (folder / "problems.json").write_text(json.dumps({str(n): ROWS["question and answer"](n) for n in THREE}, indent=1))
    return "problems.json"


def write_imagefolder(folder: Path) -> str:
    write_jsonl(folder / "metadata.jsonl", [ROWS["captions"](n) for n in THREE])
    return ""


def write_imagefolder_csv(folder: Path) -> str:
    rows = [f'{n}.jpg,"{ASKED[n] + ANSWERED[n]}"' for n in THREE]
    (folder / "metadata.csv").write_text("\n".join(["file_name,text", *rows]))
    return ""


def write_csv_gzip(folder: Path) -> str:
    content = (folder / write_csv(folder)).read_bytes()
    (folder / "m.csv.gz").write_bytes(gzip.compress(content))
    return "m.csv.gz"


def write_bzip2(folder: Path) -> str:
    (folder / "m.jsonl.bz2").write_bytes(bz2.compress(b"".join(json.dumps(llava(n)).encode() + b"\n" for n in THREE)))
    return "m.jsonl.bz2"


def write_ndjson(folder: Path) -> str:
    write_jsonl(folder / "m.ndjson", [llava(n) for n in THREE])
    return "m.ndjson"


def write_img2dataset(folder: Path) -> str:
    members = list[tuple[str, bytes]]()
    for n in THREE:
        text = ASKED[n] + ANSWERED[n]
        facts = {"caption": text, "url": f"https://a.org/{n}.jpg", "key": f"0000{n}", "width": 9, "height": 9}
        members += [(f"0000{n}.jpg", image_bytes(*SIZES[n])), (f"0000{n}.txt", text.encode())]
        members.append((f"0000{n}.json", json.dumps(facts).encode()))
    write_tar(folder / "00000.tar", members)
    return "00000.tar"


def write_parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), folder / "m.parquet", row_group_size=2)
    return "m.parquet"


def write_parts(folder: Path) -> str:
    """Messages of one type, whose parts have nulls, and images as bytes."""
    parts = [[{"type": "image", "text": None}, {"type": "text", "text": ASKED[n]}] for n in THREE]
    answers = [[{"type": "text", "text": ANSWERED[n]}] for n in THREE]
    return write_parquet(
        folder,
        [
            {
                "messages": [{"role": "user", "content": parts[n]}, {"role": "assistant", "content": answers[n]}],
                "images": [{"bytes": image_bytes(*SIZES[n]), "path": None}],
            }
            for n in THREE
        ],
    )


def write_bare_bytes(folder: Path) -> str:
    return write_parquet(folder, [{"image": image_bytes(*SIZES[n]), "text": ASKED[n] + ANSWERED[n]} for n in THREE])


def write_base64_parquet(folder: Path) -> str:
    return write_parquet(folder, [ROWS["base64"](n) for n in THREE])


def write_ipc(folder: Path) -> str:
    rows = [{"image": image_bytes(*SIZES[n]), "caption": ASKED[n] + ANSWERED[n]} for n in THREE]
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(folder / "m.arrow", table.schema) as writer:
        writer.write_table(table)
    return "m.arrow"


FILES = (
    *(write_csv, write_tsv, write_gzip, write_zst, write_object, write_arrow, write_megatron, write_energon),
    *(write_captions, write_imagefolder, write_kohya, write_kohya_metadata, write_keyed, write_imagefolder_csv),
    *(write_csv_gzip, write_bzip2, write_ndjson, write_img2dataset, write_parts, write_bare_bytes),
    *(write_base64_parquet, write_ipc),
)


@pytest.mark.parametrize("write", FILES)
def test_a_format_gives_its_texts_and_images(write: Any, folder: Path, tmp_path: Path) -> None:
    found = scanned(folder / write(folder), tmp_path)
    assert found["text_chars"] == CHARS
    assert found["image_widths"] == [[width] for width, _ in SIZES]


# Sounds of 1.5 s and 2.5 s, said to be "hi" and "yes".
SAID = {"a": (1.5, "hi"), "b": (2.5, "yes")}


def write_sounds(folder: Path) -> None:
    for name, (seconds, _) in SAID.items():
        (folder / f"{name}.wav").write_bytes(wav_bytes(seconds))


def nemo(folder: Path) -> str:
    rows = [{"audio_filepath": f"{name}.wav", "duration": SAID[name][0], "text": SAID[name][1]} for name in SAID]
    write_jsonl(folder / "manifest.json", rows)
    return "manifest.json"


def librispeech(folder: Path) -> str:
    (folder / "1-2.trans.txt").write_text("".join(f"{name} {text}\n" for name, (_, text) in SAID.items()))
    return ""


def kaldi(folder: Path) -> str:
    (folder / "wav.scp").write_text("".join(f"{name} {folder}/{name}.wav\n" for name in SAID))
    (folder / "text").write_text("".join(f"{name} {text}\n" for name, (_, text) in SAID.items()))
    return ""


def kaldi_segments(folder: Path) -> str:
    """Utterances of one recording, which a command makes."""
    (folder / "wav.scp").write_text("r sph2pipe -f wav r.sph |\n")
    (folder / "segments").write_text("a r 1.0 2.5\nb r 3.0 5.5\n")
    (folder / "text").write_text("b yes\na hi\n")
    return "wav.scp"


def audiofolder(folder: Path) -> str:
    rows = [f"{name}.wav,{text}" for name, (_, text) in SAID.items()]
    (folder / "metadata.csv").write_text("\n".join(["file_name,transcription", *rows]))
    return ""


def common_voice(folder: Path) -> str:
    rows = [f"{name}.wav\t{text}" for name, (_, text) in SAID.items()]
    (folder / "train.tsv").write_text("\n".join(["path\tsentence", *rows]))
    return "train.tsv"


def sounds_of_parts(folder: Path) -> str:
    sounds = {name: base64.b64encode(wav_bytes(seconds)).decode() for name, (seconds, _) in SAID.items()}
    parts: list[dict[str, Any]] = [{"type": "audio", "audio": "a.wav"}]
    parts.append({"type": "input_audio", "input_audio": {"data": sounds["b"], "format": "wav"}})
    texts = [{"type": "text", "text": text} for _, text in SAID.values()]
    rows = [{"messages": [{"role": "user", "content": list(pair)}]} for pair in zip(parts, texts, strict=True)]
    write_jsonl(folder / "m.jsonl", rows)
    return "m.jsonl"


def sound_shards(folder: Path) -> str:
    members = [(f"{name}.wav", wav_bytes(seconds)) for name, (seconds, _) in SAID.items()]
    members += [(f"{name}.txt", text.encode()) for name, (_, text) in SAID.items()]
    write_tar(folder / "s.tar", sorted(members))
    return "s.tar"


def sound_columns(folder: Path) -> str:
    rows = [{"audio": {"bytes": wav_bytes(seconds), "path": None}, "text": text} for seconds, text in SAID.values()]
    return write_parquet(folder, rows)


def sound_arrays(folder: Path) -> str:
    rows = [{"audio": {"array": [0.0] * int(8 * s), "sampling_rate": 8}, "text": text} for s, text in SAID.values()]
    return write_parquet(folder, rows)


SOUNDS: tuple[Callable[[Path], str], ...] = (
    *(nemo, librispeech, kaldi, kaldi_segments, audiofolder, common_voice, sounds_of_parts, sound_shards),
    *(sound_columns, sound_arrays),
)


@pytest.mark.parametrize("write", SOUNDS)
def test_a_format_gives_its_texts_and_sounds(write: Callable[[Path], str], tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write_sounds(data)
    found = scanned(data / write(data), tmp_path, root="/" if write is kaldi else "")
    assert found["audio_seconds"] == [[seconds] for seconds, _ in SAID.values()]
    assert found["text_chars"] == [len(text) for _, text in SAID.values()]


VIDEO_ROWS: tuple[tuple[dict[str, Any], list[float]], ...] = (
    ({"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4", "fps": 2.0}]}]}, [1.0]),
    ({"messages": [{"role": "user", "content": "<video>What?"}], "videos": ["a.mp4"]}, [1.0]),
    # LLaVA marks videos as images.
    ({"conversations": [{"from": "human", "value": "<image>\nWhat?"}], "video": "a.mp4"}, [1.0]),
    ({"messages": [{"role": "user", "content": "<video><video>Which?"}], "videos": ["a.mp4", "b.mp4"]}, [1.0, 2.0]),
    ({"messages": [{"content": [{"type": "video", "path": f"{n}.mp4"} for n in "bab"]}]}, [2.0, 1.0, 2.0]),
    ({"question": "a", "answer": "b", "clip": "b.mp4"}, [2.0]),
    ({"video": "gone.mp4", "duration": 7, "caption": "a"}, [7.0]),
    ({"caption": "no video"}, []),
)


def test_rows_have_any_number_of_videos(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(video_bytes(64, 48, 10))
    (tmp_path / "b.mp4").write_bytes(video_bytes(32, 48, 20))
    write_jsonl(tmp_path / "m.jsonl", [row for row, _ in VIDEO_ROWS])
    found = scanned(tmp_path / "m.jsonl", tmp_path)
    assert found["video_seconds"] == [seconds for _, seconds in VIDEO_ROWS]
    assert found["image_widths"][3:5] == [[64, 32], [32, 64, 32]]
    workload = TraceWorkload(path=str(tmp_path / "t.parquet"), frame_size=(64, 48))
    shapes = workload.source(rules_of("qwen25vl")).shapes
    # 2 frames a second, two of which are an item.
    assert np.diff(shapes.item_offsets).tolist() == [1, 1, 1, 3, 5, 2, 7, 0]
    several = read_columns(tmp_path / "t.parquet", frame_size=(64, 48))
    assert several.num_videos.tolist() == [len(seconds) for _, seconds in VIDEO_ROWS]
    assert several.frame_widths.tolist() == [64, 64, 64, 64, 32, 32, 64, 32, 32, 64]


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a URL": ([{"image": "https://a.org/x.jpg", "text": "a"}], "a URL, whose file must be downloaded first"),
    "LAION's URL": ([{"URL": "https://a.org/x.jpg?w=9", "TEXT": "a"}], "a URL, whose file must be downloaded first"),
    "a URL in a part": (
        [{"messages": [{"content": [{"type": "image_url", "image_url": {"url": "https://a.org/x"}}]}]}],
        "a URL, whose file must be downloaded first",
    ),
    "a bucket": ([{"audio": "s3://b/x.wav", "text": "a"}], "a URL, whose file must be downloaded first"),
    "unknown turns": ([{"contents": [{"parts": [{"text": "a"}]}]}], "no field has a known name; fields: contents"),
    "rows one level down": ([{"row": {"text": "a"}}], "no field has a known name; fields: row"),
    "frames": ([{"video": ["0.jpg", "1.jpg"], "text": "a"}], "2 images in place of a video. Set source.video=null"),
    "a number": ([{"image": 5, "text": "a"}], "image: int is no content, file name or size"),
    "more marks than images": (
        [{"text": "<image><image>a", "images": [{"width": 9, "height": 9}]}],
        "2 marks, 1 media",
    ),
    "an unknown field of media": ([{"text": "a", "shot": "x.jpg"}], "the field shot names some"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_that_cannot_be_read_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    rows, message = REFUSED[name]
    write_jsonl(tmp_path / "m.jsonl", rows)
    with pytest.raises(UserError) as error:
        scan_report(FileSource(path=str(tmp_path / "m.jsonl")), tmp_path / "t.parquet")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
