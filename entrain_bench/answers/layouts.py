"""A layout in words, with layers as the model's authors count them."""

from collections.abc import Sequence

from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.sharding import ZERO1


def blocks_per_stage(module: ModuleSpec, layers_per_stage: Sequence[int]) -> tuple[int, ...]:
    """Return transformer blocks of each stage: a layout counts the embedding and the head as layers, too."""
    layers = [*layers_per_stage]
    if module.config.unet is None:
        layers[0] -= 1
        layers[-1] -= 1
    return tuple(layers)


def layout_texts(model: ModelSpec, layout: Layout) -> dict[str, str]:
    """Return a short text for every module: degrees, layers of each stage, and unusual options."""
    texts = {}
    for module, placed in zip(model.modules, layout.modules, strict=True):
        blocks = "/".join(map(str, blocks_per_stage(module, placed.layers_per_stage)))
        parts = [f"TP {placed.tp}, CP {placed.cp}, PP {placed.pp}, DP {placed.dp}", f"{blocks} layers"]
        parts += [f"{placed.stages_per_rank} virtual stages per rank"] * (placed.stages_per_rank > 1)
        parts += ["recomputation"] * placed.recompute
        parts += ["offloading"] * placed.offload
        parts += [placed.sharding] * (placed.sharding != ZERO1)
        parts += [f"groups of {', '.join(f'{tp}x{cp}' for tp, cp in placed.widths)} (TP x CP)"] * bool(placed.widths)
        texts[module.name] = ", ".join(parts)
    return texts
