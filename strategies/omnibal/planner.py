"""OmniBal's balanced model partition (arXiv:2407.20761): candidates around the profiled optimum, then trials."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, product

import numpy as np

from entrain_bench.balancing.candidates import Candidate, Draft, rising_candidates
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.options import check_least
from entrain_bench.balancing.planning import (
    average_layer_s,
    partition_layers,
    place_cuts,
    recompute_choices,
    recompute_factor,
    stage_sums,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.tuning import chosen_layout
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import require
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Degrees
from entrain_bench.specs.shapes import SampleShapes

# Cuts that a candidate moves at once: all subsets would be exponentially many.
MOVED_CUTS = 2
# Partitions of least variance that are placed and rated, for given degrees; 8 and all give the same plans.
MOST_RATED = 16


@dataclass(frozen=True, slots=True)
class OmniBalPlanner:
    """Cuts the chain of encoder and LLM layers into stages by measured layers, then by trial runs of near cuts.

    Attributes:
        profile_samples: samples averaged into one shape.
        radius: layers by which cuts of the fastest profiled partition move; 0: that partition alone.
        num_trials: best estimates that fit memory and run a profiled batch on trial.
    """

    profile_samples: int = 256
    radius: int = 2
    num_trials: int = 8

    def __post_init__(self) -> None:
        check_least(self, "strategy.planner", 1, "profile_samples", "num_trials")
        require(0 <= self.radius <= 8, "strategy.planner.radius", self.radius, "at least 0, at most 8")

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The fastest in trials of the partitions with the least 1F1B time of an average microbatch."""
        samples = profile.samples.draw(self.profile_samples)
        chosen_later = make_program.chooses_recomputation

        def candidates(sized: Profile) -> Iterator[Candidate]:
            return rising_candidates(self._drafts(sized, samples, chosen_later))

        return chosen_layout(profile, candidates, make_program, self.num_trials)

    def _drafts(self, profile: Profile, samples: SampleShapes, chosen_later: bool) -> Iterator[Draft]:
        job = profile.job

        @cache
        def measured(tp: int, cp: int) -> list[FloatArray]:
            return average_layer_s(profile, samples, tp, cp)

        def place(least_s: float, degrees: Degrees, layers: tuple[int, ...], recompute: tuple[bool, ...]) -> Candidate:
            layout = place_cuts(job, degrees, layers, recompute)
            return Candidate(least_s + profile.programs.step_s(layout), layout)

        for degrees, recompute in product(job.degrees(), recompute_choices(job, chosen_later=chosen_later)):
            pairs = zip(measured(degrees.tp, degrees.cp), recompute, strict=True)
            chain_s = np.concatenate([seconds * recompute_factor(again) for seconds, again in pairs])
            if degrees.pp > len(chain_s):
                continue
            for layers in near_partitions(chain_s, degrees.pp, self.radius)[:MOST_RATED]:
                stages_s = stage_sums(chain_s, layers)
                behind = job.num_microbatches(degrees.dp) - 1
                least_s = float(stages_s.sum() + behind * stages_s.max())
                yield Draft(least_s, partial(place, least_s, degrees, layers, recompute))


def near_partitions(layer_s: FloatArray, num_stages: int, radius: int) -> list[tuple[int, ...]]:
    """Layers of each stage: the partition whose slowest stage is fastest, and those with up to two of its cuts moved.

    By rising variance of the stages' seconds, which is what the paper asks of a partition; the earlier of equal ones
    first.

    Args:
        layer_s: measured seconds of each layer of the chain ``[layers]``.
        num_stages: stages.
        radius: layers by which a cut moves at most.
    """
    optimum = np.cumsum(partition_layers(layer_s, num_stages))[:-1]
    moves = [move for move in range(-radius, radius + 1) if move]
    moved = []
    for count in range(min(MOVED_CUTS, len(optimum)) + 1 if radius else 1):
        cuts = np.array([*combinations(range(len(optimum)), count)], np.int64)
        steps = np.array([*product(moves, repeat=count)], np.int64)
        shifts = np.zeros((len(cuts), len(steps), len(optimum)), np.int64)
        places, by = np.broadcast_arrays(cuts[:, None], steps)
        np.put_along_axis(shifts, places, by, 2)
        moved.append(shifts.reshape(len(cuts) * len(steps), len(optimum)) + optimum)
    layers = np.diff(np.concatenate(moved), axis=1, prepend=0, append=len(layer_s))
    layers = layers[layers.min(axis=1) >= 1]
    until_s = np.cumsum(layer_s)[layers.cumsum(axis=1) - 1]
    spread = [decisive(variance(stages_s)) for stages_s in np.diff(until_s, axis=1, prepend=0.0)]
    return [tuple(layers[place].tolist()) for place in np.argsort(spread, kind="stable")]


def variance(values: Sequence[float] | FloatArray) -> float:
    """Mean square deviation from the mean."""
    array = np.asarray(values, np.float64)
    return float(((array - array.sum() / len(array)) ** 2).sum() / len(array))
