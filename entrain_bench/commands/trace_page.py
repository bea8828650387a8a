"""One page on a trace that was scanned: what it holds, what was left out and why, and what a model makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from entrain_bench.answers.documents.markdown import markdown_table
from entrain_bench.answers.trace_summary import (
    MAX_ROWS,
    PROBABILITIES,
    ModelSummary,
    column_quantiles,
    model_summary,
)
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.trace import Scanned, TraceCommand
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.workload import counts_of


def page_of(command: TraceCommand, found: Scanned, config_dir: str | None) -> str:
    """The page, in Markdown.

    Args:
        command: what was asked for.
        found: what the scan found.
        config_dir: a folder of the user's with further models.

    Raises:
        UserError: for overrides of a run that are wrong.
    """
    lines = [f"# {command.output.name}", "", *_scan_lines(command, found), ""]
    of = f" of the first {MAX_ROWS:,} rows" if found.samples > MAX_ROWS else ""
    lines += [f"Quantiles{of}, of rows that have any:", "", *_quantile_table(column_quantiles(command.output)), ""]
    lines += _model_lines(command, config_dir, found.samples)
    return "\n".join(lines).rstrip() + "\n"


def _scan_lines(command: TraceCommand, found: Scanned) -> Iterator[str]:
    bad = sum(found.counts.values())
    kind = str(command.source["_target_"]).rpartition(".")[2]
    again = "; scanned before, and its files have not changed (remove the trace to scan again)" if found.again else ""
    where = command.source.get("path", kind)
    yield f"{found.samples:,} samples from {found.shards:,} shards of {where} ({kind}){again}."
    yield f"{bad:,} left out{':' if bad else '.'}"
    if bad:
        yield ""
        yield from (f"- {many:,}: {reason}" for reason, many in sorted(found.counts.items(), key=lambda pair: -pair[1]))
        yield ""
        yield f"The first {len(found.listed)}:" if bad > len(found.listed) else "Which:"
        yield ""
        yield from (f"- `{name}` ({key}): {what}" for name, key, what in found.listed)


def _model_lines(command: TraceCommand, config_dir: str | None, rows: int) -> Iterator[str]:
    overrides = ["workload=trace", f"workload.path={_quoted(command.output)}", *command.run]
    if rows > MAX_ROWS:
        overrides.append(f"workload.take='first:{MAX_ROWS}'")
    if not any(text.partition("=")[0] == "workload.on_overlong" for text in command.run):
        overrides.append("workload.on_overlong=truncate")
    config = Composer(config_dir).run(overrides)
    name = config.model["name"]
    try:
        setting = prepare(config)
        listed = counts_of(setting.source)
        summary = model_summary(setting.profile, setting.source.batch(0, int(str(listed["listed"])), seed=0))
    except UserError as error:
        # Of another model it may say something; the trace is none the worse for it.
        yield f"Nothing on {name}: {error}"
        return
    yield from _summary_lines(summary, name, listed)


def _summary_lines(summary: ModelSummary, name: str, listed: Mapping[str, object]) -> Iterator[str]:
    cut = f" ({listed['truncated']} samples truncated to its context)" if listed.get("truncated") else ""
    yield f"Tokens of a sample in {name}'s LLM{cut}:"
    yield ""
    yield from _quantile_table(summary.tokens)
    yield ""
    if summary.correlation:
        pairs = ", ".join(f"{a} and {b} {value:.2f}" for (a, b), value in summary.correlation.items())
        yield f"Rank correlation (Spearman, LLM tokens of all samples): {pairs}."
    if summary.ratio is not None:
        _, median, ninth, *_ = summary.ratio
        yield f"Encoder's forward time over the LLM's, a sample: median {median:.2g}, 90% below {ninth:.2g}."
        least = f"{summary.stable_batch:,} samples" if summary.agreed else f"more than {summary.stable_batch:,} samples"
        yield f"b_min, the batch whose allocation of GPUs is stable (arXiv:2605.27918, Algorithm 1): {least}."


def _quantile_table(quantiles: Mapping[str, Sequence[float]]) -> list[str]:
    heads = ["", *("max" if share == 1 else f"p{share * 100:.0f}" for share in PROBABILITIES)]
    rows = [[name, *(f"{value:,.4g}" for value in values)] for name, values in quantiles.items()]
    return markdown_table(heads, rows, heads[1:]).splitlines()


def _quoted(path: Path) -> str:
    text = str(path if path.is_absolute() else Path("./") / path)
    text = text if "/" in text else f"./{text}"
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
