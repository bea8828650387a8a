"""The printed commands, typed one after another, lead from a data set with all kinds of rows to a plan that runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entrain_bench import BalancedBatchSampler
from entrain_bench.cli import run_command
from entrain_bench.commands import recommend
from entrain_bench.program.plan_file import read_plan
from support.datasets import image_bytes, write_finevision

# Every seventh row is corrupt, every fifth has text only, and every eleventh is longer than the model's context.
NUM_ROWS = 90
CONTEXT = 300
CORRUPT = {row for row in range(NUM_ROWS) if row % 7 == 3}
LONG = {row for row in range(NUM_ROWS) if row % 11 == 4} - CORRUPT


def row_of(number: int) -> tuple[list[bytes], list[str]]:
    images = [] if number % 5 == 0 else [image_bytes(56 + 28 * (number % 4), 84)]
    return [b"no image"] if number in CORRUPT else images, ["x" * (9000 if number in LONG else 10 + number)]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Types a command in a folder of a data set of two files, and returns its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recommend, "num_processes", lambda: 0)
    (tmp_path / "data").mkdir()
    for part in range(2):
        rows = [row_of(number) for number in range(part * NUM_ROWS // 2, (part + 1) * NUM_ROWS // 2)]
        write_finevision(tmp_path / "data" / f"train-{part}.parquet", rows)

    def type_in(command: str, *more: str) -> str:
        assert run_command([*shlex.split(command)[1:], *more]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return type_in


def line_of(out: str, start: str) -> str:
    (line,) = {line.strip() for line in out.splitlines() if line.strip().startswith(start)}
    return line


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_printed_commands_lead_from_data_to_a_plan(typed: Callable[..., str]) -> None:
    job = f"model=tiny model.modules.llm.context_tokens={CONTEXT} cluster=tiny global_batch=16 microbatch_size=2"
    out = typed(f"entrain-bench trace source.path=data output='my data.parquet' workers=1 {job}")
    assert f"{len(CORRUPT):,} left out:" in out
    assert f"({len(LONG)} samples truncated to its context)" in out
    ranked = line_of(out, "entrain-bench recommend")
    assert " workload.on_overlong=truncate" in ranked
    out = typed(ranked, "strategy=megatron,lpt", "layout.tp=1", "iterations=1", "mlflow=false")
    # The call of the sampler, on the only rank that there is or on each in turn.
    call = line_of(out, "sampler = ")
    found = re.search(r"'(\S+-loop.yaml)'", call)
    assert found
    plan = read_plan(Path(found[1]))
    ranks = plan.layout.modules[-1].dp
    seen = list[int]()
    for rank in range(ranks):
        one = sampler_of(call, rank=rank, world_size=ranks)
        assert one.num_iterations >= 4
        seen += [
            row for iteration in range(one.num_iterations) for batch in one.microbatches(iteration, 0) for row in batch
        ]
    assert len(seen) == len({*seen})
    # Rows of the data set, of which only the last incomplete global batch may be missing.
    assert {*seen} <= {*range(NUM_ROWS)} - CORRUPT
    assert len(seen) == (NUM_ROWS - len(CORRUPT)) // 16 * 16
    out = typed(line_of(out, "entrain-bench plan=").replace(" harness=train", ""), "mlflow=false")
    assert "megatron" in out or plan.strategy in out


def sampler_of(call: str, **place: int) -> BalancedBatchSampler:
    """The sampler of a printed line, whose rank torch.distributed would say."""

    class Placed(BalancedBatchSampler):
        @classmethod
        def from_plan(cls, *arguments: Any, **options: Any) -> Any:
            return super().from_plan(*arguments, **options, **place)

    names: dict[str, Any] = {"BalancedBatchSampler": Placed}
    exec(call, names)  # noqa: S102
    sampler = names["sampler"]
    assert isinstance(sampler, BalancedBatchSampler)
    return sampler
