"""GPUs of a replica that batches of a given size would give the encoder, over repeated draws.

Corresponds to arXiv:2605.27918, Tables 2 and 5-11 (59 draws at batch 1, 4, 16, 64, 256; 16 GPUs a replica); cells of
``experiments/figure/allocations.yaml``. The table has the stages that the GPUs make up as well. Above each panel: the
batch at which Algorithm 1 stops because as many draws of its own agreed; other draws of that size may still differ now
and then.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from seaborn import light_palette

from entrain_bench.answers.analysis import allocation_shares, analyse
from entrain_bench.answers.labels import names
from entrain_bench.figures._style import INK, facets, palette, say, show_reason
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "allocations"
RUNS = False
BATCH_SIZES = [1, 4, 16, 64, 256]
NUM_DRAWS = 59
MAX_BATCH = 4096
# Cells at least this dark are labelled in white.
DARK_SHARE = 0.6
SHOWN_SHARE = 0.005


def load(cells: Sequence[Cell], _: Results) -> pd.DataFrame:
    """Shares of the draws by allocation, for every trace and model."""
    sizes = {"batch_sizes": BATCH_SIZES, "num_draws": NUM_DRAWS, "max_batch": MAX_BATCH}
    return analyse(cells, allocation_shares, **sizes)


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A heat map for every model (rows) and trace (columns): encoder GPUs by batch size, share of the draws."""
    models = names(data, "model")
    traces = names(data, "workload")
    used = data[data["share"] > 0]["encoder_gpus"]
    low = used.min() - 1
    high = used.max() + 1
    shown = data[data["encoder_gpus"].between(low, high)]
    height = 0.55 + len(models) * (0.42 + 0.17 * (shown["encoder_gpus"].nunique()))
    figure, axes = facets([*models], [*traces], height)
    first_model, *_, last_model = [*models, *models]
    first_trace = next(iter(traces))
    num_gpus = data["encoder_gpus"].iloc[0] + data["llm_gpus"].iloc[0]
    for model, trace, panel in axes:
        rows = shown[(shown["model"] == model) & (shown["workload"] == trace)]
        _draw_panel(panel, rows, first=trace == first_trace, last=model == last_model)
        if trace == first_trace:
            panel.set_ylabel(f"{models[model]}\nEncoder GPUs (of {num_gpus})")
        if model == first_model:
            panel.set_title(traces[trace], pad=12)
    draws = data["num_draws"].iloc[0]
    say(figure, _message(data))
    figure.supxlabel(f"Batch size (samples); numbers: % of {draws} draws with this allocation", fontsize="medium")
    amounts = ["encoder_gpus", "llm_gpus", "encoder_stages", "llm_stages"]
    return figure, data[["model", "workload", "num_draws", "batch_size", *amounts, "share", "stable_batch"]]


def _message(data: pd.DataFrame) -> str:
    """How often all draws of the smallest and of the largest batches agree."""
    agree = data.groupby(["batch_size", "model", "workload"])["share"].max() >= 1.0 - SHOWN_SHARE
    sizes = agree.groupby(level="batch_size").agg(["sum", "size"])
    said = [f"{row['sum']} of {row['size']} jobs at batch {size}" for size, row in sizes.iloc[[0, -1]].iterrows()]
    return f"All draws give the encoder the same GPUs on {' and '.join(said)}."


def _draw_panel(panel: Axes, rows: pd.DataFrame, first: bool, last: bool) -> None:
    if rows.empty:
        show_reason(panel, "no data")
        return
    table = rows.pivot_table(index="encoder_gpus", columns="batch_size", values="share").sort_index(ascending=False)
    colours = light_palette(palette(["only"])["only"], as_cmap=True)
    panel.imshow(table.to_numpy(), cmap=colours, vmin=0, vmax=1, aspect="auto")
    for row, shares in enumerate(table.to_numpy()):
        for column, share in enumerate(shares):
            if share >= SHOWN_SHARE:
                colour = "white" if share >= DARK_SHARE else INK
                panel.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=colour)
    panel.set_xticks(range(table.shape[1]), [str(size) for size in table.columns] if last else [])
    panel.set_yticks(range(table.shape[0]), [str(gpus) for gpus in table.index] if first else [])
    panel.tick_params(length=0)
    panel.grid(visible=False)
    stable = rows["stable_batch"].iloc[0]
    note = f"Alg. 1 stops at {stable}" if stable else "Alg. 1 does not stop"
    panel.text(0.5, 1.02, note, transform=panel.transAxes, ha="center", va="bottom", color=INK)
