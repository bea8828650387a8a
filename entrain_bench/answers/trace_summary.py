"""What a shape trace says at a glance: quantiles of its columns, and what a model makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from entrain_bench.answers.analysis import encoder_shares
from entrain_bench.balancing.planning import stable_samples
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray
from entrain_bench.specs.shapes import SampleShapes

PROBABILITIES = (0.01, 0.5, 0.9, 0.99, 1.0)
# Rows that a summary is of, at most: the first.
MAX_ROWS = 1_000_000
_MEGAPIXEL = 1e6
_NUM_DRAWS, _NUM_SAMPLES = 59, 8192


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What a model makes of a trace.

    Attributes:
        tokens: quantiles of the tokens of a sample, by what they are of.
        correlation: Spearman correlation over all samples of pairs of text and modalities, in LLM tokens.
        ratio: quantiles over samples of the encoders' estimated forward time over the LLM's; None without encoders.
        stable_batch: samples at which the allocation of GPUs is stable (b_min of arXiv:2605.27918, Algorithm 1); None
            without encoders.
        agreed: whether it was found below the batch at which the search gives up.
    """

    tokens: Mapping[str, Sequence[float]]
    correlation: Mapping[tuple[str, str], float]
    ratio: Sequence[float] | None
    stable_batch: int | None
    agreed: bool


def column_quantiles(path: Path) -> dict[str, list[float]]:
    """Quantiles of what a scanned trace holds, over the rows that have any; by name and unit.

    Args:
        path: a trace as ``entrain-bench trace`` writes it.
    """
    table = _first_rows(path)
    found = dict[str, FloatArray]()
    for column, name in (("text_tokens", "text (tokens)"), ("text_chars", "text (characters)"), ("n_images", "images")):
        if column in table.column_names:
            found[name] = _numbers(table, column)
    sides = [table.column(f"image_{side}s").combine_chunks().flatten() for side in ("width", "height")]
    width, height = (np.asarray(side.to_numpy(zero_copy_only=False), np.float64) for side in sides)
    found["image or frame (megapixels)"] = width * height / _MEGAPIXEL
    for kind in ("audio", "video"):
        found[f"{kind} (s)"] = _numbers(table, f"{kind}_seconds")
    return {name: _quantiles(values) for name, values in found.items() if len(values) and values.max() > 0}


def model_summary(profile: Profile, shapes: SampleShapes, max_batch: int = 4096) -> ModelSummary:
    """What a model makes of samples.

    Args:
        profile: of the job; what is estimated, and where further samples are drawn.
        shapes: the samples.
        max_batch: where the search for the stable batch gives up.

    Raises:
        UserError: for samples of modalities that the model does not have, and a layout that it has no room for.
    """
    model = profile.job.model
    model.check_shapes(shapes)
    columns = {"text": shapes.text_tokens.astype(np.float64)}
    for name in shapes.modalities:
        items = shapes.items_of([name])
        if items.size:
            columns[name] = shapes.sum_items(items, shapes.item_llm_tokens[items].astype(np.float64))
    tokens = {name: _quantiles(values) for name, values in columns.items()}
    tokens["LLM, all"] = _quantiles(shapes.llm_tokens.astype(np.float64))
    # Sizes that are all the same correlate with nothing.
    varied = {name: pd.Series(values) for name, values in columns.items() if np.ptp(values)}
    pairs = {(a, b): varied[a].corr(varied[b], "spearman") for a, b in combinations(varied, 2)}
    encodes = any(shapes.items_of(module.config.modalities).size for module in model.encoders)
    if not encodes:
        return ModelSummary(tokens, pairs, None, None, agreed=False)
    degrees = next(profile.job.degrees())
    shares = encoder_shares(profile, degrees, 1, _NUM_SAMPLES)
    with np.errstate(divide="ignore"):
        ratio = _quantiles(shares / (1 - shares))
    stable, agreed = stable_samples(profile, degrees, _NUM_DRAWS, max_batch)
    return ModelSummary(tokens, pairs, ratio, stable, agreed)


def _first_rows(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:
        rows = 0
        for groups in range(1, file.metadata.num_row_groups + 1):
            rows += file.metadata.row_group(groups - 1).num_rows
            if rows >= MAX_ROWS:
                break
        return file.read_row_groups(list(range(groups)))


def _numbers(table: pa.Table, column: str) -> FloatArray:
    values = pc.drop_null(table.column(column)).to_numpy()
    return np.asarray(values, np.float64)


def _quantiles(values: FloatArray) -> list[float]:
    """Values that occur, at ``PROBABILITIES``."""
    return [float(value) for value in np.quantile(values, PROBABILITIES, method="inverted_cdf")]
