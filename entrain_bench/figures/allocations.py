"""GPUs of a replica that batches of a given size would give the encoder, over repeated draws.

Corresponds to arXiv:2605.27918, Tables 2 and 5-11 (59 draws at batch 1, 4, 16, 64, 256; 16 GPUs a replica); cells of
``experiments/figure/allocations.yaml``. A number is the share of draws whose batch asks for the most frequent
allocation of its size; 100% means that all draws agree. The CSV has every allocation, its stages, and the batch at
which Algorithm 1 stops.
"""

from functools import partial

import pandas as pd

from entrain_bench.answers.analysis import allocation_shares, analyse
from entrain_bench.answers.labels import names
from entrain_bench.figures._forms import heatmap_of
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, GOOD, ROW_IN, Picture, panels

EXPERIMENT = "allocations"
RUNS = False
# Draws agree from here on.
AGREEING = 0.995

load = partial(analyse, compute=allocation_shares, batch_sizes=[1, 4, 16, 64, 256], num_draws=59, max_batch=4096)


def draw(data: pd.DataFrame) -> Picture:
    """A panel a model, a row a trace, a column a batch size: encoder GPUs, and how many draws agree on them."""
    models = names(data, "model")
    traces = names(data, "workload")
    figure, axes = panels(1, len(models), DOUBLE_COLUMN_IN, 0.75 + ROW_IN * len(traces), sharey=True)
    case = ["model", "workload", "batch_size"]
    most = data.sort_values("share", ascending=False, kind="stable").drop_duplicates(case)
    texts = [f"{gpus}: {share:.0%}" for gpus, share in zip(most["encoder_gpus"], most["share"], strict=True)]
    shown = most.assign(text=texts).set_index(case).sort_index()
    sizes = {size: str(size) for size in sorted(most["batch_size"].unique())}
    for panel, (model, label) in zip(axes, models.items(), strict=True):
        heatmap_of(panel, pd.DataFrame(shown.loc[model]), traces, sizes, "share", cmap=GOOD, vmin=0, vmax=1.3)
        panel.set(title=label, xlabel="batch size (samples)")
    gpus = data["encoder_gpus"].iloc[0] + data["llm_gpus"].iloc[0]
    figure.supxlabel(f"encoder GPUs (of {gpus}): share of draws")
    agree = most["share"].ge(AGREEING).groupby(most["batch_size"]).agg(["sum", "size"])
    said = [f"{row['sum']} of {row['size']} jobs at batch {size}" for size, row in agree.iloc[[0, -1]].iterrows()]
    amounts = ["encoder_gpus", "llm_gpus", "encoder_stages", "llm_stages"]
    table = data[["model", "workload", "num_draws", "batch_size", *amounts, "share", "stable_batch"]]
    return Picture(figure, table, f"All draws give the encoder the same GPUs on {' and '.join(said)}.")
