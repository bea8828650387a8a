"""Layouts of an encoder and an LLM with degrees of their own on eight ranks, planned as they are given."""

from __future__ import annotations

from dataclasses import dataclass, replace

from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.profile import Profile
from entrain_bench.program.layout import Layout
from entrain_bench.run.cells import compose_cells
from entrain_bench.specs.job import Degrees
from entrain_bench_strategies.hetero import Pair, place_pair
from support.builders import even
from support.train.handover import config_to_json
from support.train.runs import SETTING

RANKS = 8
# Degrees (TP, CP, PP, DP) of the encoder and of the LLM, on ranks of their own.
DISJOINT = {
    "tp2_dp2_to_tp4_dp1": ((2, 1, 1, 2), (4, 1, 1, 1)),
    "tp4_dp1_to_tp2_dp2": ((4, 1, 1, 1), (2, 1, 1, 2)),
    "tp1_dp4_to_tp4_dp1": ((1, 1, 1, 4), (4, 1, 1, 1)),
    "tp4_dp1_to_tp1_dp4": ((4, 1, 1, 1), (1, 1, 1, 4)),
    "pp2_dp2_to_pp2_dp2": ((1, 1, 2, 2), (1, 1, 2, 2)),
    "tp2_pp2_to_pp2_dp2": ((2, 1, 2, 1), (1, 1, 2, 2)),
    "dp4_to_cp2_dp2": ((1, 1, 1, 4), (1, 2, 1, 2)),
    "tp2_dp2_to_tp2_cp2": ((2, 1, 1, 2), (2, 2, 1, 1)),
}
# Both on all ranks.
COLOCATED = {
    "colocated_tp2_dp4_to_tp4_dp2": ((2, 1, 1, 4), (4, 1, 1, 2)),
    "colocated_tp4_dp2_to_tp2_dp4": ((4, 1, 1, 2), (2, 1, 1, 4)),
}
CASES = DISJOINT | COLOCATED


@dataclass(frozen=True, slots=True)
class GivenPlanner:
    """The layout of these degrees.

    Attributes:
        encoder: TP, CP, PP, DP of the encoder.
        llm: the same of the LLM.
        colocated: whether both are on all ranks.
    """

    encoder: tuple[int, ...]
    llm: tuple[int, ...]
    colocated: bool

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:  # noqa: ARG002
        job, pair = profile.job, Pair(Degrees(*self.encoder), Degrees(*self.llm))
        stages = [pair.encoder.pp if module.is_encoder else pair.llm.pp for module in job.model.modules]
        layers = [even(len(module.layers), pp) for module, pp in zip(job.model.modules, stages, strict=True)]
        return place_pair(job, pair, layers, [False] * len(layers), colocated=self.colocated)


def configuration_of(case: str, *overrides: str) -> str:
    """A case's run as text for the ranks."""
    encoder, llm = CASES[case]
    assert sum(tp * cp * pp * dp for tp, cp, pp, dp in (encoder, llm)) == (2 * RANKS if case in COLOCATED else RANKS)
    given = [*SETTING, "model=tiny", f"harness.num_ranks={RANKS}", f"cluster.gpus_per_node={RANKS}", *overrides]
    given += [f"strategy=hetero_{'colocated' if case in COLOCATED else 'noncolocated'}", "layout.cp=null"]
    given.append("cluster.tiers=[{name: network, bandwidth_bytes_per_s: 6.0e9, latency_s: 14.0e-6}]")
    config = compose_cells(given)[0].config
    planner = {"_target_": f"{__name__}.GivenPlanner", "encoder": [*encoder], "llm": [*llm]}
    planner["colocated"] = case in COLOCATED
    return config_to_json(replace(config, strategy={**config.strategy, "planner": planner}))
