"""A layout in plain words: degrees or groups of each module, its layers and ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from entrain_bench.answers.text import count
from entrain_bench.base.arrays import IntArray
from entrain_bench.program.layout import Layout, ModuleLayout

# Spans of ranks in a line at most.
MAX_SPANS = 6


def layout_lines(layout: Layout) -> list[str]:
    """Return a line per module (degrees, layers of each stage, ranks), and lines on shared ranks."""
    width = max(len(placed.module) for placed in layout.modules)
    lines = [f"{placed.module.ljust(width)}  {'; '.join(_parts(placed))}" for placed in layout.modules]
    return [*lines, *_sharing(layout)]


def _parts(placed: ModuleLayout) -> Iterator[str]:
    # Virtual stages count as the one that their ranks make up.
    physical = int(np.unique(placed.ranks[0]).size) // placed.ranks_per_block
    grouped = len(placed.widths) > 1
    if grouped:
        yield f"PP {physical}, groups of TP x CP {', '.join(f'{tp}x{cp}' for tp, cp in placed.widths)}"
    else:
        yield f"TP {placed.tp}, CP {placed.cp}, PP {physical}, DP {placed.dp}"
    stages = f"{placed.stages_per_rank} virtual stages a rank, " if placed.stages_per_rank > 1 else ""
    yield f"{stages}layers {'/'.join(map(str, placed.layers_per_stage))}"
    steps = np.unique(np.diff(placed.ranks, axis=0))
    others = ""
    if placed.dp > 1 and not grouped:
        last = int(placed.ranks.max())
        later = f", each next replica {count(int(steps[0]), 'rank')} later"
        others = later if len(steps) == 1 else f", other replicas up to rank {last}"
    yield f"ranks {spans(placed.ranks if grouped else placed.ranks[0])}{others}"
    if placed.sharded:
        yield f"weights sharded over all {'ranks' if grouped else 'replicas'}, gathered layer by layer"
    if placed.recompute:
        yield "activations recomputed"
    if placed.offload:
        yield "weights off the device between forwards and backwards"


def _sharing(layout: Layout) -> list[str]:
    sets = {placed.module: {*placed.ranks.ravel().tolist()} for placed in layout.modules}
    names = [*sets]
    if len(names) == 1:
        return []
    if all(sets[name] == sets[names[0]] for name in names):
        return ["All modules share all ranks."]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if sets[a] & sets[b]]
    if not pairs:
        return ["No module shares a rank with another."]
    return [f"{a} and {b} share {len(sets[a] & sets[b])} ranks." for a, b in pairs]


def spans(ranks: IntArray) -> str:
    """Return ranks in words: ``0-15``, ``0-3, 8-11``; a long list is shortened."""
    each = np.unique(ranks)
    cuts = np.flatnonzero(np.diff(each) != 1) + 1
    parts = [f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in np.split(each, cuts)]
    return ", ".join(parts if len(parts) <= MAX_SPANS else [*parts[: MAX_SPANS - 1], "...", parts[-1]])
