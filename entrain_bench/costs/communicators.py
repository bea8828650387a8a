"""How many NCCL communicators a rank belongs to."""

import numpy as np

from entrain_bench.base.arrays import BoolArray, IntArray
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec


def count_communicators(model: ModelSpec, layout: Layout) -> IntArray:
    """Communicators that a rank of each lane belongs to ``[lanes]``.

    TP and CP at every width, EP, gradients of experts, all gradients (DP x CP) and a tied embedding's two ends have one
    each, and all ranks one for transfers. Modules and stages with the same ranks share one, as in Megatron-LM; a group
    of one rank has none.
    """
    members = dict[tuple[object, ...], BoolArray]()

    def join(group: tuple[object, ...], lanes: IntArray) -> None:
        members.setdefault(group, np.zeros(layout.num_lanes, bool))[lanes] = True

    for index, (module, placed, blocks) in enumerate(zip(model.modules, layout.modules, layout.blocks, strict=True)):
        # Groups are aligned, so a rank's group follows from its stride and its size.
        degrees = {(placed.tp, placed.cp), *placed.degrees}
        split = {group for tp, cp in degrees for group in ((1, tp), (tp, cp)) if group[1] > 1}
        ends = {0, placed.pp - 1} if module.config.tied_embeddings and not placed.is_closed else ()
        for stage in range(placed.pp):
            lanes = blocks.of_stage(stage)
            for group in split:
                join(group, lanes)
            if placed.ep > 1:
                join(("experts", placed.tp, placed.ep, placed.plane[stage].tobytes()), lanes)
                if placed.dp * placed.cp > placed.ep:
                    join(("gradients of experts", placed.tp, placed.ep, placed.plane[stage].tobytes()), lanes)
            if placed.dp * placed.cp > 1:
                join(("gradients", placed.tp, placed.plane[stage].tobytes()), lanes)
            if stage in ends:
                join(("embedding", index), lanes)
    joined = np.sum([*members.values()], axis=0, dtype=np.int64) if members else np.zeros(layout.num_lanes, np.int64)
    return np.asarray(joined + (layout.num_ranks > 1))
