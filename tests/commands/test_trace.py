"""``entrain-bench trace``, from files to a run; and what is wrong in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.commands.trace import TraceKeys, compose_trace
from entrain_bench.commands.trace_page import page_html
from support.datasets import image_bytes, write_finevision, write_tar


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [([image_bytes(56 + 28 * (row % 5), 84)], ["x" * (10 + 7 * row)]) for row in range(40)]
    write_finevision(folder / "a.parquet", [*rows, ([b"bad\x1b[0m"], ["t"])])
    return folder


def test_from_files_to_a_run(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["trace", f"source.path={data}", "output=mine.parquet", "workers=1"]
    assert run_command(command) == 0
    out, _ = capsys.readouterr()
    assert out.rstrip() == Path("mine.md").read_text().rstrip()
    assert "40 samples from 1 shards" in out
    assert "- 1: no known format" in out
    assert "`a.parquet:40`: no known format: no image" in out
    assert "| image or frame (megapixels) |" in out
    assert "Encoder's forward time over the LLM's" in out
    assert "b_min, the batch whose allocation of GPUs is stable" in out
    assert "    entrain-bench recommend data=mine.parquet model=MODEL cluster=16xh100\n" in out
    page = Path("mine.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "<h1>mine.parquet</h1>" in page
    assert "<td>image or frame (megapixels)</td>" in page
    assert "entrain-bench recommend data=mine.parquet" in page
    assert "Most LLM tokens: <code>" in page
    assert run_command([*command, "model=whisper_qwen25_7b"]) == 0
    out, _ = capsys.readouterr()
    assert "scanned before" in out
    assert "Nothing on whisper_qwen25_7b: " in out
    small = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2"]
    run = ["workload=trace", "workload.path=mine.parquet", *small, "iterations=1", "mlflow=false"]
    assert run_command(run) == 0


@pytest.mark.wide
def test_the_page_fits_the_cluster_and_its_command_takes_overlong_rows(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_finevision(data / "b.parquet", [([image_bytes(56, 84)], ["x" * 800_000])])
    run = ["model=qwen25vl_llama3_1b", "cluster=2xh100"]
    assert run_command(["trace", f"source.path={data}", "output=mine.parquet", "workers=1", *run]) == 0
    out, _ = capsys.readouterr()
    assert "Tokens of a sample in qwen25vl_llama3_1b's LLM (1 samples truncated to its context):" in out
    ranked = "data=mine.parquet model=qwen25vl_llama3_1b cluster=2xh100 workload.on_overlong=truncate"
    assert f"    entrain-bench recommend {ranked}\n" in out


def test_names_of_a_data_set_stay_text_on_its_page() -> None:
    hostile = "a `<script>alert(1)</script>` b <img src=x> [l](http://x.y) ![p](http://x.y/z.png) <http://x.y>"
    page = page_html("<b>.parquet", f"- `{hostile}`: one\n")
    inside = page[page.index("<main>") : page.index("</main>")]
    assert not [mark for mark in ("<script", "<img", "<a ", "<http") if mark in inside]
    assert "<h1>&lt;b&gt;.parquet</h1>" in page


@pytest.mark.wide
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("", "source.path: missing; FileSource needs it"),
        ("source=tar", "source=tar: unknown; choices: files, hub, llava, manifest, parquet, webdataset"),
        ("source.path=data source.pth=x", "source.pth=x: unknown key (did you mean source.path=x?)"),
        ("source.path=data output=x.csv", "output=x.csv: must end with .parquet"),
        ("source.path=data engine=spark", "engine=spark: must be processes or ray"),
        ("source.path=data strategy=entrain", "strategy=entrain: unknown key; choices: cluster"),
        ("source.path=data source.images=photo", "has no field photo; fields: images, texts"),
        ("source.path=data tokenizer=none.json", "tokenizer=none.json: does not exist"),
        ("source.path=data tokenizer=data/a.parquet", "tokenizer=data/a.parquet: no tokenizer.json"),
    ],
)
def test_mistakes_are_one_line(data: Path, arguments: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert data.is_dir()
    assert run_command(["trace", *arguments.split()]) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert what in err


def test_a_tokenizer_that_is_a_file(data: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save("tokenizer.json")
    write_tar(data / "s.tar", [("1.txt", b"a b a b a"), ("2.txt", b"c")])
    command = ["trace", "source=webdataset", f"source.path={data}", "output=w.parquet", "workers=1"]
    assert run_command([*command, "tokenizer=tokenizer.json"]) == 0
    import pandas as pd

    assert pd.read_parquet("w.parquet")["text_tokens"].tolist() == [5, 1]


def test_the_tokenizer_of_the_model_is_taken_where_it_is_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    revision = "0" * 40
    held = tmp_path / "cache" / "models--org--held"
    for folder in (tmp_path / "model", held / "snapshots" / revision):
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text("{}")
    (held / "refs").mkdir()
    (held / "refs" / "main").write_text(revision)
    of_model, of_hub = (
        str(folder / "tokenizer.json") for folder in (tmp_path / "model", held / "snapshots" / revision)
    )

    def chosen(keys: TraceKeys, *overrides: str) -> object:
        command = compose_trace(keys, ["source.path=data", *overrides], None)
        return command.scan.__self__.tokenizer  # type: ignore[attr-defined]

    assert chosen(TraceKeys(), f"model={tmp_path}/model") == of_model
    assert chosen(TraceKeys(), f"model={tmp_path}/model/config.json") == of_model
    assert chosen(TraceKeys(), "model=hf:org/held") == of_hub
    assert chosen(TraceKeys(tokenizer=f"{tmp_path}/model")) == of_model
    assert chosen(TraceKeys(tokenizer="hf:org/held"), f"model={tmp_path}/model") == of_hub
    assert chosen(TraceKeys(tokenizer="own.json"), f"model={tmp_path}/model") == "own.json"
    assert [chosen(TraceKeys(tokenizer=None), "model=hf:org/held"), chosen(TraceKeys(), "model=tiny")] == [None, None]
    capsys.readouterr()
    assert chosen(TraceKeys(), "model=hf:org/other") is None
    assert "text: characters, because hf:org/other has no tokenizer.json here" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"^tokenizer=hf:org/other: has no tokenizer\.json here\. Fetch it with"):
        chosen(TraceKeys(tokenizer="hf:org/other"))


def test_data_without_a_known_field_are_told_with_their_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.jsonl").write_text('{"words": "a", "n": 4}\n')
    assert run_command(["trace", "source.path=own.jsonl", "workers=1"]) == 2
    fields = "no field has a known name; fields: words, n. Set source.text=words (the longest text), source.images, "
    assert fields in capsys.readouterr().err
    assert run_command(["trace", "source.path=own.jsonl", "source.text=words", "workers=1"]) == 0
