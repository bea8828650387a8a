"""What is emulated takes as long as what is trained, in one process that alternates between them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from time import thread_time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from entrain_bench.lab.fidelity.programs import COMMON, IMAGE, first_program
from entrain_bench.run.cells import compose_cells
from entrain_bench.train.emulate.bench import Bench
from entrain_bench.train.emulate.emulator import lane_orders, stage_shapes
from entrain_bench.train.measuring.clock import Clock
from entrain_bench.train.messages.positions import believed_order
from entrain_bench.train.platform import rank_of_many
from entrain_bench.train.running.build import build_runtime
from entrain_bench.train.running.groups import GroupMaker

# TP, CP and PP of each layout.
LAYOUTS = {"pp2": (1, 1, 2), "tp2": (2, 1, 1), "cp2": (1, 2, 1), "cp4": (1, 4, 1), "tp2_cp2": (2, 2, 1)}
# Shares of text of about 5% and 100%.
TEXT = {
    "5%": ("workload.text.median=8", f"{IMAGE}.llm_tokens.median=150", f"{IMAGE}.llm_tokens.sigma=0.3"),
    "100%": ("workload.text.median=200", f"{IMAGE}.probability=0"),
}
# So that it matters which tokens a head has logits of.
WIDE_HEAD = ("model.modules.llm.vocab_size=8192",)
WARM_UPS, PAIRS, CPU = 2, 15, torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "text", "head"), [*product(LAYOUTS, TEXT, ("all", "labelled"))])
def test_every_stage_takes_as_long_trained_as_emulated(layout: str, text: str, head: str) -> None:
    """Collectives return at once in both: what they cost a core besides is their own, and not a stage's."""
    tp, cp, pp = LAYOUTS[layout]
    degrees = f"layout.tp={tp}", f"layout.cp={cp}", f"layout.pp={pp}", "layout.dp=1", f"head_tokens={head}"
    ranks = f"cluster.gpus_per_node={tp * cp * pp}", f"harness.num_ranks={tp * cp * pp}", "global_batch=8"
    (cell,) = compose_cells([*COMMON, *TEXT[text], *degrees, *ranks, *WIDE_HEAD, "strategy=megatron", "seed=0"])
    setting, program = first_program(cell.config)
    bench, order = Bench("cpu", "float32", 0, 1, setting.job.framework), lane_orders(program)[0]
    stages = {int(program.module[action]): int(program.stage[action]) for action in order.actions}
    shapes = map(stage_shapes, program.model.modules, program.layout.modules)
    held = [own[stages[index]] for index, own in enumerate(shapes) if index in stages]
    with rank_of_many(tp * cp * pp):
        world = dist.group.WORLD
        settings = replace(setting.executor, dtype="float32")
        maker = GroupMaker(world, 60.0, CPU)
        runtime = build_runtime(setting.job, program.layout, settings, CPU, 0, world, maker)
        work = runtime.prepare(program, believed_order(program, setting.profile))
        inputs, emulated = [*work.inputs], bench.build(program.model, held)
        trained_s, emulated_s = [], []
        for pair in range(WARM_UPS + PAIRS):
            clock = Clock(CPU, thread_time)
            runtime.run(replace(work, inputs=iter(inputs)), clock)
            own_s = bench.time_order(emulated, program, order)[0]
            if pair >= WARM_UPS:
                trained_s.append({int(action): end - start for action, start, end, *_ in clock.rows()})
                emulated_s.append(dict(zip(order.actions.tolist(), own_s.tolist(), strict=True)))
    for module, stage in stages.items():
        own = [action for action in order.actions.tolist() if program.module[action] == module]
        pairs = zip(emulated_s, trained_s, strict=True)
        # Of neighbours in time, for the speed of a machine changes.
        ratios = [sum(one[action] for action in own) / sum(other[action] for action in own) for one, other in pairs]
        where = f"{program.model.modules[module].name}, stage {stage}: emulated/trained"
        assert 0.9 <= np.median(ratios) <= 1.1, f"{where} {np.median(ratios):.3f}"
