"""One page on a scanned trace: its content, left-out samples with reasons, and its tokens under a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from entrain_bench.answers.analysis import encoder_shares
from entrain_bench.answers.commands import command_line, quoted
from entrain_bench.answers.text import load_template, markdown_table, to_html
from entrain_bench.balancing.planning import stable_samples
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.workload import counts_of

PROBABILITIES = (0.01, 0.5, 0.9, 0.99, 1.0)
# Rows that a summary is of, at most: the first.
MAX_ROWS = 1_000_000
MEGAPIXEL = 1e6
NUM_DRAWS = 59
NUM_SAMPLES = 8192
MAX_BATCH = 4096
# Rows with most LLM tokens that are listed, and data-parallel ranks that a batch is spread over.
NUM_HEAVIEST = 5
RANKS = (8, 64)


def page_of(output: Path, source: Mapping[str, Any], run: Sequence[str], scanned: Any, config_dir: str | None) -> str:
    """The page on a trace, in Markdown without its title; ``UserError`` for overrides of its ``run`` that are wrong."""
    lines = [*_scan_lines(source, scanned), ""]
    of = f" of the first {MAX_ROWS:,} rows" if scanned.samples > MAX_ROWS else ""
    lines += [f"Quantiles{of}, of rows that have any:", "", *_quantile_table(_columns(output)), ""]
    truncated, said = _model_lines(output, run, config_dir, scanned.samples)
    lines += said
    # Without it, data with rows beyond the model's context are refused.
    overlong = ("workload.on_overlong=truncate",) if truncated else ()
    chosen = {text.partition("=")[0]: text for text in ("model=MODEL", "cluster=16xh100", *overlong, *run)}
    command = command_line(["recommend", f"data={quoted(str(output))}", *chosen.values()], config_dir)
    lines += ["", "Rank the strategies on it:", "", f"    {command}"]
    return "\n".join(lines).rstrip() + "\n"


def page_html(title: str, page: str) -> str:
    """Return a page in Markdown as one HTML file without scripts; names of files and fields in it stay text."""
    return load_template("page.html").render(title=title, sections={}, body=to_html(page, plain=True)) + "\n"


def _scan_lines(source: Mapping[str, Any], scanned: Any) -> Iterator[str]:
    bad = sum(scanned.counts.values())
    kind = str(source["_target_"]).rpartition(".")[2]
    again = "; scanned before, and its files have not changed (remove the trace to scan again)" if scanned.again else ""
    where = source.get("path", kind)
    yield f"{scanned.samples:,} samples from {scanned.shards:,} shards of {where} ({kind}){again}."
    if scanned.shards < scanned.all_shards:
        errors = ", ".join(f"{name} {error:.1%}" for name, error in scanned.errors.items())
        said = f"Means may be off by (95% confidence): {errors}." if errors else "One shard tells no error."
        yield f"A random part of {scanned.all_shards:,} shards. {said} To scan all, set max_rows=null."
    yield f"Found: {', '.join(f'{many:,} {kind}' for kind, many in scanned.items.items())}."
    yield f"{bad:,} left out{':' if bad else '.'}"
    if bad:
        reasons = sorted(scanned.counts.items(), key=lambda pair: -pair[1])
        yield from ("", *(f"- {many:,}: {reason}" for reason, many in reasons), "")
        yield from (f"The first {len(scanned.listed)}:" if bad > len(scanned.listed) else "Which:", "")
        yield from (f"- `{name}`: {what}" for name, what in scanned.listed)
    yield from _uncounted_lines(scanned)


def _uncounted_lines(scanned: Any) -> Iterator[str]:
    """Yield found fields that the scan does not count, with their share, and marks that differ from media."""
    if scanned.unmatched:
        share = scanned.unmatched / scanned.rows
        yield (
            f"Warning: in {scanned.unmatched:,} of {scanned.rows:,} rows ({share:.1%}) marks such as <image> "
            f"and media differ (first: {scanned.example})."
        )
    text = scanned.chars + sum(each.amount for each in scanned.left_fields() if each.kind == "text")
    lines = list[str]()
    for each in scanned.left_fields():
        what = f"{each.amount:,} values of {each.kind}"
        if each.kind == "text":
            what = f"{each.amount:,} characters ({each.amount / text:.1%} of all text)"
        lines.append(f"- `{each.name}`: {what}, in {each.rows:,} of {scanned.rows:,} rows")
    unread = sorted(scanned.unread.items())
    lines += [f"- {many:,} `{ending}` files next to those that were read" for ending, many in unread]
    if lines:
        yield from ("", "Not counted:", "", *lines)


def _model_lines(output: Path, run: Sequence[str], config_dir: str | None, rows: int) -> tuple[int, list[str]]:
    """Return how many rows were truncated to a model's context, and lines on its tokens."""
    path = str(output)
    path = (path if "/" in path else f"./{path}").replace("\\", "\\\\").replace("'", "\\'")
    given = {text.partition("=")[0] for text in run}
    overrides = ["workload=trace", f"workload.path='{path}'", *run]
    if rows > MAX_ROWS:
        overrides.append(f"workload.take='first:{MAX_ROWS}'")
    if "workload.on_overlong" not in given:
        overrides.append("workload.on_overlong=truncate")
    if "cluster" in given and not any(name.startswith("layout") for name in given):
        # The default degrees are those of the default cluster.
        overrides += [f"layout.{degree}=null" for degree in ("tp", "cp", "pp", "dp")]
    config = Composer(config_dir).run(overrides)
    name = config.model["name"]
    try:
        setting = prepare(config)
        listed = counts_of(setting.source)
        shapes = setting.source.batch(0, int(str(listed["listed"])), seed=0)
        lines = [*_summary_lines(setting.profile, shapes)]
    except UserError as error:
        # This model cannot take the trace; others may, so the page continues.
        return 0, [f"Nothing on {name}: {error}"]
    truncated = int(str(listed.get("truncated", 0)))
    cut = f" ({truncated} samples truncated to its context)" if truncated else ""
    return truncated, [f"Tokens of a sample in {name}'s LLM{cut}:", "", *lines]


def _summary_lines(profile: Profile, shapes: SampleShapes) -> Iterator[str]:
    """Summarize a model's view of samples: tokens in the LLM, share of its encoders; ``UserError`` for a misfit."""
    model = profile.job.model
    model.check_shapes(shapes)
    columns = {"text": shapes.text_tokens.astype(np.float64)}
    for modality in shapes.modalities:
        items = shapes.items_of([modality])
        if items.size:
            columns[modality] = shapes.sum_items(items, shapes.item_llm_tokens[items].astype(np.float64))
    yield from _quantile_table({**columns, "LLM, all": shapes.llm_tokens.astype(np.float64)})
    yield from ("", *_heaviest_lines(shapes), *_uneven_lines(shapes, profile.job.global_batch), "")
    if not any(shapes.items_of(module.config.modalities).size for module in model.encoders):
        return
    degrees = next(profile.job.degrees())
    shares = encoder_shares(profile, degrees, 1, NUM_SAMPLES)
    with np.errstate(divide="ignore"):
        _, median, ninth, *_ = _quantiles(shares / (1 - shares))
    yield f"Encoder's forward time over the LLM's, a sample: median {median:.2g}, 90% below {ninth:.2g}."
    stable, agreed = stable_samples(profile, degrees, NUM_DRAWS, MAX_BATCH)
    least = f"{stable:,} samples" if agreed else f"more than {stable:,} samples"
    yield f"b_min, the batch whose allocation of GPUs is stable (arXiv:2605.27918, Algorithm 1): {least}."


def _heaviest_lines(shapes: SampleShapes) -> Iterator[str]:
    """Name the samples with most LLM tokens."""
    first = np.argsort(-shapes.llm_tokens, kind="stable")[:NUM_HEAVIEST]
    rows = (f"`{shapes.name_of(row)}` {shapes.llm_tokens[row]:,}" for row in first.tolist())
    yield f"Most LLM tokens: {', '.join(rows)}."


def _uneven_lines(shapes: SampleShapes, batch: int) -> Iterator[str]:
    """State how uneven batches are if ranks take samples as they come: the largest rank over the mean, of tokens."""
    encoder = shapes.sum_items(np.arange(shapes.num_items), shapes.item_encoder_tokens.astype(np.float64))
    for ranks in RANKS:
        many = len(shapes) // batch
        if not many or batch % ranks:
            continue
        said = []
        for what, tokens in (("LLM", shapes.llm_tokens.astype(np.float64)), ("encoder", encoder)):
            of_ranks = tokens[: many * batch].reshape(many, ranks, batch // ranks).sum(axis=2)
            means = of_ranks.mean(axis=1)
            if means.min() > 0:
                said.append(f"{(of_ranks.max(axis=1) / means).mean():.2f} ({what} tokens)")
        yield f"Largest of {ranks} ranks over their mean, batches of {batch}: {', '.join(said)}."


def _columns(path: Path) -> dict[str, FloatArray]:
    """Sizes in a scanned trace, of the rows that have any."""
    with pq.ParquetFile(path) as file:
        rows = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)])
        groups = range(min(int(np.searchsorted(rows, MAX_ROWS)) + 1, len(rows)))
        table = file.read_row_groups([*groups])
    columns = {
        "text_tokens": "text (tokens)",
        "text_chars": "text (characters)",
        "n_images": "images",
        "megapixels": "image or frame (megapixels)",
        "audio_seconds": "audio (s)",
        "video_seconds": "video (s)",
    }
    width, height = (
        table.column(f"image_{side}s").combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.float64)
        for side in ("width", "height")
    )
    sizes = {"megapixels": width * height / MEGAPIXEL}
    for name in columns.keys() & table.column_names:
        column = table.column(name).combine_chunks()
        flat = column.flatten() if pa.types.is_list(column.type) else column.drop_null()
        sizes[name] = flat.to_numpy(zero_copy_only=False).astype(np.float64)
    return {title: sizes[name] for name, title in columns.items() if name in sizes and sizes[name].max(initial=0) > 0}


def _quantiles(values: FloatArray) -> list[float]:
    return [float(value) for value in np.quantile(values, PROBABILITIES, method="inverted_cdf")]


def _quantile_table(columns: Mapping[str, FloatArray]) -> list[str]:
    heads = ["", *("max" if share == 1 else f"p{share * 100:.0f}" for share in PROBABILITIES)]
    rows = [[name, *(f"{value:,.4g}" for value in _quantiles(values))] for name, values in columns.items()]
    return markdown_table(heads, rows, heads[1:]).splitlines()
