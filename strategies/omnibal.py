"""OmniBal (arXiv:2407.20761): data, model and memory balanced together.

Mini-batches under two caps by iterative sampling and filtering (Algorithm 1), and stages that cut encoder and LLM
wherever trials say. Recomputation by stage is ``entrain_bench.balancing.recomputation``'s.
"""

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
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import require
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Degrees
from entrain_bench.specs.shapes import SampleShapes

# Growth of the caps per attempt, and their maximum, relative to the average tokens of a microbatch.
CAP_STEP = 0.05
MAX_CAP = 8.0


@dataclass(frozen=True, slots=True)
class Caps:
    """Maximum tokens of a group: in the encoders (the paper's Q_v counts images) and in the LLM (Q_t)."""

    vision: int
    text: int


def filtered_groups(vision: IntArray, text: IntArray, caps: Caps, threshold: float, rounds: int, seed: int) -> IntArray:
    """Return the group of each sample, numbered from 0 ``[samples]``, from its encoder and LLM tokens ``[samples]``.

    Each round shuffles the remaining samples and fills groups in that order, each until it reaches a cap. A group that
    fills a cap to ``threshold`` is kept; samples of other groups enter the next round. After the last round all groups
    are kept. A sample above a cap forms its own group; the public code drops it.
    """
    group = np.full(len(text), -1)
    beyond = (vision > caps.vision) | (text > caps.text)
    count = int(beyond.sum())
    group[beyond] = np.arange(count)
    left = np.flatnonzero(~beyond)
    for number in range(rounds):
        order = left[np.random.default_rng([seed, number]).permutation(len(left))]
        groups = fill(vision[order], text[order], caps.vision, caps.text)
        sums = [np.bincount(groups, weights=tokens[order]) for tokens in (vision, text)]
        full = (sums[0] >= threshold * caps.vision) | (sums[1] >= threshold * caps.text)
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
    """Return the group of each sample: the open group, or a new one if the sample would exceed a cap ``[samples]``."""
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


def caps_for(vision: IntArray, text: IntArray, microbatch_size: int, threshold: float, rounds: int, seed: int) -> Caps:
    """Return the least caps whose groups have ``microbatch_size`` samples on average.

    As in the public code, both caps start at the mean lengths and grow in steps, in the proportion of the batch's
    tokens.
    """
    caps = Caps(1, 1)
    share = 1.0
    most_groups = -(-len(text) // microbatch_size)
    while share <= MAX_CAP:
        caps = Caps(
            *(
                max(1, int(np.ceil(share * microbatch_size * int(tokens.sum()) / len(text))))
                for tokens in (vision, text)
            )
        )
        if 1 + filtered_groups(vision, text, caps, threshold, rounds, seed).max() <= most_groups:
            break
        share += CAP_STEP
    return caps


@dataclass(frozen=True, slots=True)
class OmniBalAssigner:
    """Assigner that groups samples under caps on encoder and LLM tokens, and deals groups to replicas in turn.

    Attributes:
        max_vision_tokens: Q_v in encoder tokens; None: chosen together with Q_t.
        max_text_tokens: Q_t in LLM tokens; None: the least caps whose groups have ``microbatch_size`` samples on
            average.
        threshold: share of a cap at which a group is full; the public code has 3968 of 4096 tokens.
        rounds: T of the iterative sampling and filtering; 1: one random order fills all groups.
        seed: seed of the shuffles.
    """

    max_vision_tokens: int | None = None
    max_text_tokens: int | None = None
    threshold: float = 0.97
    rounds: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        where = "strategy.assigner"
        check_least(self, where, 1, "max_vision_tokens", "max_text_tokens", "rounds")
        check_least(self, where, 0, "seed")
        both = (self.max_vision_tokens is None) == (self.max_text_tokens is None)
        require(
            both,
            f"{where}.max_vision_tokens",
            self.max_vision_tokens,
            f"null exactly if max_text_tokens is null; max_text_tokens={self.max_text_tokens}",
        )
        require(0 < self.threshold <= 1, f"{where}.threshold", self.threshold, "above 0, at most 1")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Make group g the microbatch g // DP of replica g mod DP."""
        job = profile.job
        dp = layout.modules[-1].dp
        modalities = [name for module in job.model.encoders for name in module.config.modalities]
        vision = shapes.encoder_tokens(modalities)
        text = shapes.llm_tokens
        filtering = self.threshold, self.rounds, self.seed
        if self.max_vision_tokens is not None and self.max_text_tokens is not None:
            caps = Caps(self.max_vision_tokens, self.max_text_tokens)
        else:
            caps = caps_for(vision, text, job.microbatch_size, *filtering)
        group = filtered_groups(vision, text, caps, *filtering)
        return same_microbatches(job.model, shapes, group % dp, group // dp, group // dp)


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
