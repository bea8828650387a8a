"""Opening a scanned trace for training: where its data are now, whether they and the tokenizer are the scan's."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.specs.workload import Moved
from entrain_bench_workloads.dataset.records import RecordSource
from entrain_bench_workloads.trace import TraceWorkload
from support.datasets import write_jsonl
from support.scanned import RULES, annotations, finevision, opened, scanned, webdataset

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
    tar = scanned(webdataset(tmp_path / "tar"), tmp_path / "tar.parquet")
    with pytest.raises(UserError, match=r"^harness.data_root=x: must be null, because TarSource data names no files$"):
        opened(tar, root="x")


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
    source = RecordSource(path=str(tmp_path / "d.jsonl"), text=["text"])
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
    table = pq.read_table(tmp_path / "t.parquet")
    scan = json.loads(table.schema.metadata[b"entrain_bench.scan"])
    scan["source"]["kind"] = "HubSource"
    pq.write_table(table.replace_schema_metadata({"entrain_bench.scan": json.dumps(scan)}), tmp_path / "hub.parquet")
    with pytest.raises(UserError, match=r"scanned from HubSource, whose records cannot be read one by one"):
        opened(TraceWorkload(path=str(tmp_path / "hub.parquet")))


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
    table = pq.read_table(tmp_path / "t.parquet")
    scan = json.loads(table.schema.metadata[b"entrain_bench.scan"])
    within = scan if len(place) == 1 else scan[place[0]]
    within[place[-1]] = value
    if value is None:
        del within[place[-1]]
    pq.write_table(table.replace_schema_metadata({"entrain_bench.scan": json.dumps(scan)}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=OTHER_VERSION):
        opened(workload)
