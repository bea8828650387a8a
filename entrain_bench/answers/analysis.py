"""Analyses of a workload's shapes: the tables behind figures that need no run."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from entrain_bench.answers.labels import label_columns
from entrain_bench.balancing.planning import allocate_gpus, gpus_to_stages, stable_samples
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results, labels_of
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import Degrees


def token_quantiles(profile: Profile, num_samples: int, num_points: int) -> pd.DataFrame:
    """Quantiles (values that occur) of ``encoder_tokens`` and ``llm_tokens`` per freshly drawn sample."""
    shapes = profile.samples.draw(num_samples)
    profile.job.model.check_shapes(shapes)
    modalities = [modality for module in profile.job.model.encoders for modality in module.config.modalities]
    probability = np.linspace(0.0, 1.0, num_points)
    columns = {"encoder_tokens": shapes.encoder_tokens(modalities), "llm_tokens": shapes.llm_tokens}
    quantiles = {
        name: np.quantile(tokens, probability, method="inverted_cdf").astype(np.int64)
        for name, tokens in columns.items()
    }
    return pd.DataFrame({"probability": probability, **quantiles})


def allocation_shares(profile: Profile, batch_sizes: Sequence[int], num_draws: int, max_batch: int) -> pd.DataFrame:
    """How often each allocation of a replica's GPUs comes out of batches of a size.

    Returns:
        Columns ``batch_size``, ``encoder_gpus``, ``llm_gpus``, ``encoder_stages``, ``llm_stages`` (unit of the GPUs),
        ``share`` of the draws (every possible allocation has a row), ``num_draws`` and ``stable_batch`` (0: none up to
        ``max_batch``); the last two are constant.
    """
    degrees = next(profile.job.degrees())
    width = degrees.tp * degrees.cp
    total = degrees.pp * width
    stable, agreed = stable_samples(profile, degrees, num_draws, max_batch)
    rows = []
    for size in batch_sizes:
        gpus = [allocate_gpus(profile, profile.samples.draw(size), degrees)[0] for _ in range(num_draws)]
        count = np.bincount(gpus, minlength=total)
        rows += [
            (size, own, total - own, *gpus_to_stages((own, total - own), width), count[own] / num_draws)
            for own in range(width, total - width + 1)
        ]
    columns = ["batch_size", "encoder_gpus", "llm_gpus", "encoder_stages", "llm_stages", "share"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(num_draws=num_draws, stable_batch=stable if agreed else 0)


def encoder_shares(profile: Profile, degrees: Degrees, batch_size: int, num_draws: int) -> FloatArray:
    """The encoders' share of the estimated forward time of freshly drawn batches ``[num_draws]``."""
    samples = profile.samples.draw(batch_size * num_draws)
    profile.job.model.check_shapes(samples)
    encoder, llm = profile.estimates.samples(samples, degrees.tp, degrees.cp)
    encoder, llm = (seconds.reshape(num_draws, batch_size).sum(axis=1) for seconds in (encoder, llm))
    shares: FloatArray = encoder / (encoder + llm)
    return shares


def analyse(cells: Sequence[Cell], _: Results, compute: Callable[..., pd.DataFrame], **parameters: Any) -> pd.DataFrame:
    """Tables of ``compute(profile, **parameters)`` for every cell, with its workload, model and labels."""
    frames = []
    for cell in cells:
        try:
            frame = compute(prepare(cell.config).profile, **parameters)
        except UserError as error:
            raise UserError(f"{error} (in {' '.join(cell.overrides)})") from error
        labels = labels_of(cell.config)
        columns = {name: labels[name] for name in ("workload", "model")} | label_columns(cell.config)
        frames.append(pd.DataFrame({**dict.fromkeys(columns), **frame}).assign(**columns))
    return pd.concat(frames, ignore_index=True)
