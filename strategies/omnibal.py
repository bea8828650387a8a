"""OmniBal (arXiv:2407.20761): data, model and memory balanced together.

Mini-batches under two caps by iterative sampling and filtering (Algorithm 1), and stages that cut encoder and LLM
wherever trials say. Recomputation by stage is ``entrain_bench.balancing.recomputation``'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, product

import numpy as np

from entrain_bench.balancing.candidates import Candidate, Draft, rising_candidates
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.options import TrialOptions
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
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Degrees
from entrain_bench.specs.parse import Count
from entrain_bench.specs.shapes import SampleShapes

# Growth of the caps per attempt, and their maximum, relative to the average tokens of a microbatch.
CAP_STEP = 0.05
MAX_CAP = 8.0
# Share of a cap at which a group is full; the public code has 3968 of 4096 tokens.
THRESHOLD = 0.97
# Seed of the shuffles.
SEED = 0
# Cuts that a candidate moves at once: all subsets would be exponentially many.
MOVED_CUTS = 2
# Partitions of least variance that are placed and rated, for given degrees; 8 and all give the same plans.
MOST_RATED = 16
# Layers by which cuts of the fastest profiled partition move.
RADIUS = 2


def filtered_groups(tokens: IntArray, caps: tuple[int, int], rounds: int) -> IntArray:
    """The group of each sample, numbered from 0 ``[samples]``, from its encoder and LLM tokens ``[2, samples]``.

    Each round shuffles the remaining samples and fills groups in that order, each until it reaches a cap. A group that
    fills a cap to ``THRESHOLD`` is kept, and all of the last round. A sample above a cap forms its own group.
    """
    vision, text = tokens
    group = np.full(len(text), -1)
    beyond = (vision > caps[0]) | (text > caps[1])
    count = int(beyond.sum())
    group[beyond] = np.arange(count)
    left = np.flatnonzero(~beyond)
    for number in range(rounds):
        order = left[np.random.default_rng([SEED, number]).permutation(len(left))]
        groups = fill(vision[order], text[order], *caps)
        sums = [np.bincount(groups, weights=column[order]) for column in tokens]
        full = (sums[0] >= THRESHOLD * caps[0]) | (sums[1] >= THRESHOLD * caps[1])
        if number == rounds - 1:
            full[:] = True
        renumbered = count + np.cumsum(full) - 1
        stays = full[groups]
        group[order[stays]] = renumbered[groups[stays]]
        count += int(full.sum())
        left = order[~stays]
        if not len(left):
            break
    return group


@njit()
def fill(vision, text, most_vision, most_text):  # type: ignore[no-untyped-def]
    """The group of each sample: the open group, or a new one if the sample would exceed a cap ``[samples]``."""
    group = np.empty(len(text), np.int64)
    number = 0
    own_vision = 0
    own_text = 0
    empty = True
    for sample in range(len(text)):
        exceeds = own_vision + vision[sample] > most_vision or own_text + text[sample] > most_text
        if exceeds and not empty:
            number = number + 1
            own_vision = 0
            own_text = 0
        group[sample] = number
        empty = False
        own_vision += vision[sample]
        own_text += text[sample]
    return group


def grouped(tokens: IntArray, microbatch_size: int, rounds: int) -> IntArray:
    """``filtered_groups`` under the least caps, in steps from mean lengths, with ``microbatch_size`` on average."""
    num_samples = tokens.shape[1]
    share = 1.0
    while True:
        vision, text = (
            max(1, int(np.ceil(share * microbatch_size * int(column.sum()) / num_samples))) for column in tokens
        )
        group = filtered_groups(tokens, (vision, text), rounds)
        share += CAP_STEP
        if 1 + group.max() <= -(-num_samples // microbatch_size) or share > MAX_CAP:
            return group


@dataclass(frozen=True, slots=True)
class OmniBalAssigner:
    """Groups samples under caps on encoder and LLM tokens, and deals groups to replicas in turn.

    Attributes:
        rounds: T of the iterative sampling and filtering; 1: one random order fills all groups.
    """

    rounds: Count = 10

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Make group g the microbatch g // DP of replica g mod DP."""
        job = profile.job
        dp = layout.modules[-1].dp
        modalities = [name for module in job.model.encoders for name in module.config.modalities]
        tokens = np.stack([shapes.encoder_tokens(modalities), shapes.llm_tokens])
        group = grouped(tokens, job.microbatch_size, self.rounds)
        return same_microbatches(job.model, shapes, group % dp, group // dp, group // dp)


@dataclass(frozen=True, slots=True)
class OmniBalPlanner(TrialOptions):
    """Cuts the chain of encoder and LLM layers into stages by measured layers, then by trial runs of near cuts."""

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
            for layers in near_partitions(chain_s, degrees.pp)[:MOST_RATED]:
                stages_s = stage_sums(chain_s, layers)
                behind = job.num_microbatches(degrees.dp) - 1
                least_s = float(stages_s.sum() + behind * stages_s.max())
                yield Draft(least_s, partial(place, least_s, degrees, layers, recompute))


def near_partitions(layer_s: FloatArray, num_stages: int, radius: int = RADIUS) -> list[tuple[int, ...]]:
    """Layers of each stage: the partition whose slowest stage is fastest, and those with up to two of its cuts moved.

    By rising variance of the stages' seconds, as the paper asks; cuts move by ``radius`` layers at most.
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
    spread = []
    for stages_s in np.diff(until_s, axis=1, prepend=0.0):
        mean_s = stages_s.sum() / num_stages
        spread.append(decisive(float(((stages_s - mean_s) ** 2).sum() / num_stages)))
    return [tuple(layers[place].tolist()) for place in np.argsort(spread, kind="stable")]
