"""Conventions of data: what is counted, what is named as not counted, and marks that differ from the media."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.errors import UserError
from entrain_bench.commands.trace_page import page_of
from entrain_bench_workloads.dataset.conventions import Chosen, table_of
from entrain_bench_workloads.dataset.fields import Known, sample_of
from entrain_bench_workloads.dataset.formats import FileSource
from entrain_bench_workloads.dataset.source import BadSampleError, Reason
from entrain_bench_workloads.dataset.tokenizers import token_ids
from entrain_bench_workloads.trace import TraceWorkload
from support.datasets import scan_report, write_jsonl
from support.specs import rules_of


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
    left = [(each.kind, each.name, each.rows, each.amount) for each in report.left_fields()]
    assert left == [("images", "shots", 1, 2), ("text", "note.of", 2, 6)]
    assert report.chars == 8
    page = page_of(tmp_path / "t.parquet", {"_target_": "a.FileSource", "path": "m"}, ["model=tiny"], report, None)
    assert "- `note.of`: 6 characters (42.9% of all text), in 2 of 2 rows" in page
    assert "- `shots`: 2 values of images, in 1 of 2 rows" in page


def marked(path: Path, wrong: int, many: int) -> FileSource:
    good = {"text": "<image>a", "images": [{"width": 3, "height": 2}]}
    write_jsonl(path / "m.jsonl", [{**good, "text": "<image><image>a"}] * wrong + [good] * (many - wrong))
    return FileSource(path=str(path / "m.jsonl"))


def test_marks_are_compared_with_media(tmp_path: Path) -> None:
    report = scan_report(marked(tmp_path, 1, 100), tmp_path / "t.parquet")
    assert (report.unmatched, report.example) == (1, "m.jsonl:0: 2 marks, 1 media")
    with pytest.raises(UserError, match=r"in 2 of 100 rows marks .* differ \(first: m.jsonl:0: .*source.marks=ignore$"):
        scan_report(marked(tmp_path, 2, 100), tmp_path / "u.parquet")
    source = FileSource(path=str(tmp_path / "m.jsonl"), marks="ignore")
    assert scan_report(source, tmp_path / "v.parquet").unmatched == 0


def test_media_that_cannot_be_read_are_refused_with_their_reason(tmp_path: Path) -> None:
    for value, reason in (("https://a.org/x.jpg", Reason.URL), ("/etc/hostname", Reason.OUTSIDE)):
        with pytest.raises(BadSampleError) as error:
            sample_of({"image": value}, Chosen(), str(tmp_path))
        assert error.value.reason == reason
    with pytest.raises(
        BadSampleError, match=r"video: 2 images in place of a video. Set source.video=null source.images=video "
    ):
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


TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"


def test_a_chat_template_next_to_the_tokenizer_is_counted(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1, "<user>": 2, "<end>": 3, "b": 4}, unk_token="?"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "alone").mkdir()
    tokenizer.save(str(tmp_path / "alone" / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    rows: list[dict[str, Any]] = [
        {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "a"}]},
        {"text": "a b a"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}]},
        {"texts": [{"user": "a", "assistant": "b"}]},
        {"system": "b", "messages": [{"role": "user", "content": "a"}]},
    ]
    write_jsonl(tmp_path / "m.jsonl", rows)
    found = {}
    for folder in (tmp_path, tmp_path / "alone"):
        scan_report(FileSource(path=str(tmp_path / "m.jsonl")), folder / "t.parquet", str(folder / "tokenizer.json"))
        found[folder.name] = pq.read_table(folder / "t.parquet")["text_tokens"].to_pylist()
    # A role and an end around each turn.
    assert [*found.values()] == [[7, 3, 4, 6, 6], [3, 3, 2, 2, 2]]
    chosen = token_ids(sample_of(rows[0], Chosen(), ""), str(tmp_path / "tokenizer.json"))
    assert chosen.tolist() == [2, 1, 4, 3, 0, 1, 3]


def test_turns_that_a_chat_template_refuses_are_left_out_with_the_reason(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))  # noqa: S106
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system') if messages[0].role == 'system' }}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    rows = [{"messages": [{"role": role, "content": "a"}]} for role in ("system", "user")]
    write_jsonl(tmp_path / "m.jsonl", rows)
    source = FileSource(path=str(tmp_path / "m.jsonl"))
    report = scan_report(source, tmp_path / "t.parquet", str(tmp_path / "tokenizer.json"))
    assert report.samples == 1
    assert [*map(tuple, report.listed)] == [
        ("m.jsonl:0", "no valid record: the chat template refuses its turns: no system")
    ]
