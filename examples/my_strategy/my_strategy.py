"""A strategy to copy: every hook, when it is called, what it is given and what it must return.

It is a real one. ``SplitByWork`` gives every module as many stages as its share of the work, ``LongestFirst`` puts the
longest samples where they delay least, and ``EncodersAhead`` lets encoder stages run ahead of 1F1B.

A strategy is a planner, an assigner and a scheduler, named by a YAML (``strategy/mine.yaml``). No base class: a part is
whatever has the hook. Write the part that you care about, and take the others from elsewhere.

A run calls the hooks in this order (``entrain_bench/run/experiment.py``, ``entrain_bench/balancing/interface.py``)::

    plan                once; what it asks of make_program calls assign (its draft's, if there is one) and schedule;
                        checks of memory try the draft of a scheduler that has one first
    assign, schedule    once more on profiled samples, unmeasured, so that what compiles has been compiled
    assign, schedule    for every batch; their wall time is measured, and paid where it exceeds the iteration's
    observe             with every executed iteration. The batch after it is on its way by then: what iteration 0 taught
                        is first used for iteration 2

Every hook is a pure function of what it is given: parts are frozen and remember nothing, the same arguments give the
same bits on every machine, and no decision looks at a clock. Sorts are ``kind="stable"``, and estimates are compared by
``decisive``, which rounds away the digits in which machines differ. To learn, ``observe`` returns another part.

What a hook may know is in its arguments: shapes of samples, a layout, an assignment, and a ``Profile``:

    job                 model, cluster, batch, memory budget; degrees() lists the (TP, CP, PP, DP) that the user allows
    samples             draw: samples of the workload, separate from the training stream; every call draws new ones
                        state, restore: go back to earlier draws
                        tuning_batches: the batches that the tuner of ``chosen_layout`` sees; mean_units: a mean sample
    layers              measure: seconds of one layer of each kind of a module, both passes, on a packed microbatch
                        layer_s: likewise of every layer, forward and backward together
                        measure_packs: likewise for several packed microbatches
                        pack_times: seconds that a sequence adds to a packed microbatch, and that a microbatch costs
                        forward_fit: a x^2 + b x + c through measured forwards, for each layer kind
                        mean_microbatch_s: seconds of every layer on a microbatch of mean samples
                        traffic: seconds of the collectives of layers whose weights are sharded
    estimates           units: estimated forward seconds of every unit (an item, for the LLM a sample) of a module
                        samples: likewise for every sample: all encoders together, and the LLM
                        error_factor: the error of estimates (belief_error, belief_bias); multiply your own by it
                        remember: keeps an estimate of yours for a batch, so that trials compute it once
    programs            simulate: ends of a program's actions under estimated durations; transfers free or as measured
                        iteration_s: seconds of an iteration under such durations, with transfers, gathers and the step
                        with_weights_s: such durations with the time of moving offloaded or sharded weights
                        handovers: measured seconds of transfers between a program's actions
                        step_s: seconds of gathers, gradient synchronization and optimizer outside mean microbatches
                        lane_steps_s, exposed_steps: likewise for every lane, and for every stage of every module
    memory              bytes of layouts (lane_state_bytes) and of programs (peak_bytes)
    trial_s             measured seconds of a program's iteration: a trial run, for planners
    tuning_budget       batches that the tuner of ``chosen_layout`` may simulate
    each_microbatch_size, under, for_job    the profile for every microbatch size that a planner may choose, for a
                        layout's microbatch size, and for another job of the model
    smoothed            the profile with estimation errors averaged over units of about the same length
    corrected           the profile with estimates corrected by executed iterations

A part imports from ``entrain_bench`` only the rooms in ``OPEN_ROOMS`` (``entrain_bench/conformance/suite.py``): never
costs, simulator or records. ``entrain-bench check --config-dir examples/my_strategy strategy=mine`` tells whether all
of this holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.candidates import Candidate, by_estimate
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.planning import (
    chain_starts,
    partition_layers,
    place_chain,
    proportional_allocation,
    recompute_choices,
    recompute_factor,
    stage_sums,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import backward_microbatch, chain_chunks, one_f_one_b, stages_behind
from entrain_bench.balancing.tuning import chosen_layout
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import IncompatibleError, require
from entrain_bench.program import Program, Slots, build_program
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.specs.job import Degrees
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class SplitByWork:
    """Planner: a chain of stages, each module's share of them its share of the work; the fastest degrees in trials.

    The fields of a part are its options. A run refuses keys of the YAML that are none, and values of another type, with
    one line that names the key; what else an option must be is for ``__post_init__``.

    Attributes:
        profile_samples: samples that layers are measured on.
        num_trials: best estimates that fit memory and run a profiled batch on trial.
    """

    # A model may have generators behind the LLM. For a part without this line such a run is refused, and skipped in a
    # sweep, which is right for every part that takes the LLM for the last module.
    handles_generators: ClassVar[bool] = True

    profile_samples: int = 128
    num_trials: int = 4

    def __post_init__(self) -> None:
        require(self.profile_samples >= 1, "strategy.planner.profile_samples", self.profile_samples, "at least 1")
        require(self.num_trials >= 1, "strategy.planner.num_trials", self.num_trials, "at least 1")

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The layout of the run: for every module its degrees, layers per stage, ranks and recomputation.

        Called once, before the first batch.

        Args:
            profile: what may be known; ``profile.job`` says what is asked for.
            make_program: what this strategy's assigner and scheduler make of a batch under a layout. Here
                ``chosen_layout`` calls it, first to see whether a layout fits memory, then to run it on trial.

        Returns:
            A layout of the job's model on the job's cluster; what ``check_layout`` refuses ends the run.

        Raises:
            UserError: if nothing meets the request or fits memory; one line that says what is missing.
        """
        model = profile.job.model
        samples = profile.samples.draw(self.profile_samples)
        # Modules of a group (the encoders, the LLM, the generators) share their stages.
        most = [min(len(model.modules[index].layers) for index in group) for group in model.module_groups]

        # Called with the given microbatch size, or with every possible one for microbatch_size=null.
        def candidates(sized: Profile) -> list[Candidate]:
            return by_estimate(
                candidate(sized, samples, degrees, most, recompute)
                for degrees in sized.job.degrees()
                if len(most) <= degrees.pp <= sum(most)
                for recompute in recompute_choices(sized.job)
            )

        return chosen_layout(profile, candidates, make_program, self.num_trials)


def candidate(
    profile: Profile, samples: SampleShapes, degrees: Degrees, most: Sequence[int], recompute: Sequence[bool]
) -> Candidate:
    """The layout with the given degrees, and its time under 1F1B if all microbatches were average."""
    job, model = profile.job, profile.job.model
    layer_s = [
        recompute_factor(again) * measured_layer_s(profile, module, samples, degrees)
        for module, again in zip(model.modules, recompute, strict=True)
    ]
    group_s = np.array([sum(float(layer_s[index].sum()) for index in group) for group in model.module_groups])
    stages = proportional_allocation(degrees.pp, group_s, most)
    layers = [
        partition_layers(layer_s[index], num_stages)
        for group, num_stages in zip(model.module_groups, stages, strict=True)
        for index in group
    ]
    stage_s = np.zeros(degrees.pp)
    firsts = chain_starts(model, degrees.pp, layers, leading=True)
    for first, seconds, split in zip(firsts, layer_s, layers, strict=True):
        stage_s[first : first + len(split)] += stage_sums(seconds, split)
    layout = place_chain(job, degrees, layers, recompute, leading=True)
    pipeline_s = float(stage_s.sum() + (job.num_microbatches(degrees.dp) - 1) * stage_s.max())
    return Candidate(pipeline_s + profile.programs.step_s(layout), layout)


def measured_layer_s(profile: Profile, module: ModuleSpec, samples: SampleShapes, degrees: Degrees) -> FloatArray:
    """Seconds of both passes of every layer of a module for an average microbatch ``[layers]``."""
    lengths = module.lengths(samples, module.units(samples))
    if not len(lengths):
        return np.zeros(len(module.layers))
    kind_s = [float(times.total_s[0]) for times in profile.layers.measure(module, lengths, degrees.tp, degrees.cp)]
    return profile.job.microbatch_size / len(samples) * np.array(kind_s)[module.layer_kind]


@dataclass(frozen=True, slots=True)
class LongestFirst:
    """Assigner: longest processing time first, then exchanges; the lightest microbatches start a pipeline.

    What fills and drains a pipeline is its first microbatches, so these should be light.

    Attributes:
        num_exchanges: swaps of two samples, at most, that relieve the slowest microbatch.
        pace: executed over believed seconds of every module, learnt by ``observe``; empty before.
    """

    handles_generators: ClassVar[bool] = True

    num_exchanges: int = 32
    pace: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(self.num_exchanges >= 0, "strategy.assigner.num_exchanges", self.num_exchanges, "at least 0")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch of every unit of every module.

        Called for every batch, for profiled batches while the planner plans, and once before the first iteration.

        Args:
            shapes: the global batch: text tokens of every sample, tokens of every item; no content.
            layout: the planner's, or one that it tries.
            profile: for beliefs about these samples.

        Returns:
            Labels of every unit (``ModuleSpec.units``) of every module, in the model's order. Encoders and the LLM may
            place a sample differently; ``same_microbatches`` moves it as a whole. A microbatch is a place in the order
            of its replica, from 0; how many there are, and how large, is the assigner's choice.

        Raises:
            IncompatibleError: for a layout or a model that there is no rule for. A sweep skips the run and says why.
        """
        dp = common_dp(layout)
        work_s = self.stage_s(shapes, layout, profile)
        microbatch = longest_first(work_s, dp * layout.num_microbatches)
        microbatch = lightest_first(work_s, exchanged(work_s, microbatch, self.num_exchanges))
        # The lightest are the first of all replicas.
        replica, place = microbatch % dp, microbatch // dp
        return same_microbatches(profile.job.model, shapes, replica, place, place)

    def draft(self) -> LongestFirst:
        """Optional: a quicker assigner, for planners that try many layouts.

        Called once, before ``plan``, whose ``make_program`` uses what it returns. Its assignments must need about the
        same memory, for planners judge by them whether a layout fits.
        """
        return replace(self, num_exchanges=0)

    def observe(self, timeline: Timeline, profile: Profile) -> LongestFirst:
        """Optional: the assigner of later iterations, after one was executed.

        Called with every executed iteration, in order.

        Args:
            timeline: the program, and when each of its actions started and ended. Only durations count as known, which
                a real system can time.
            profile: as for ``assign``.

        Returns:
            An assigner that knows more, or ``self`` as it was.
        """
        program, seconds = timeline.program, timeline.end_s - timeline.start_s
        believed_s = replace(self, pace=()).stage_s(program.shapes, program.layout, profile)
        pace = []
        for index, placed in enumerate(program.layout.modules):
            executed = float(seconds[program.forward_actions(index)].sum()) / placed.pp
            believed = float(believed_s[:, index].sum())
            pace.append(executed / believed if believed else 1.0)
        return replace(self, pace=tuple(pace))

    def stage_s(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> FloatArray:
        """Believed forward seconds of every sample on a stage of every module ``[samples, modules]``."""
        work_s = np.zeros((len(shapes), len(layout.modules)))
        for column, module, placed in zip(work_s.T, profile.job.model.modules, layout.modules, strict=True):
            # Units of encoders and generators are items, the LLM's are samples.
            seconds = profile.estimates.units(module, shapes, placed.tp, placed.cp) / placed.pp
            column[:] = shapes.sum_items(module.units(shapes), seconds) if module.per_item else seconds
        return work_s * (self.pace or 1.0)


def common_dp(layout: Layout) -> int:
    """The DP of all modules.

    Raises:
        IncompatibleError: if they differ.
    """
    degrees = {placed.dp for placed in layout.modules}
    if len(degrees) > 1:
        raise IncompatibleError(f"layout: modules differ in DP ({sorted(degrees)}), but a sample goes to one replica")
    return layout.modules[0].dp


def longest_first(work_s: FloatArray, num_microbatches: int) -> IntArray:
    """Microbatch of every sample ``[samples]``: each goes where the slowest module ends first; all of one size."""
    room = np.full(num_microbatches, -(-len(work_s) // num_microbatches))
    load_s = np.zeros((num_microbatches, work_s.shape[1]))
    microbatch = np.empty(len(work_s), np.int64)
    for sample in np.argsort(-decisive(work_s.max(axis=1)), kind="stable"):
        after_s = decisive((load_s + work_s[sample]).max(axis=1))
        best = int(np.where(room > 0, after_s, np.inf).argmin())
        microbatch[sample] = best
        load_s[best] += work_s[sample]
        room[best] -= 1
    return microbatch


def exchanged(work_s: FloatArray, microbatch: IntArray, num_exchanges: int) -> IntArray:
    """The microbatches ``[samples]`` after swaps with the slowest one, each the swap that relieves it most."""
    microbatch = microbatch.copy()
    for _ in range(num_exchanges):
        load_s = loads_s(work_s, microbatch)
        slowest = int(decisive(load_s.max(axis=1)).argmax())
        mine = np.flatnonzero(microbatch == slowest)
        given_s = work_s[mine][:, None] - work_s  # [own, samples, modules]
        after_s = np.maximum(load_s[slowest] - given_s, load_s[microbatch] + given_s).max(axis=2)
        after_s[:, mine] = np.inf
        one, other = np.unravel_index(decisive(after_s).argmin(), after_s.shape)
        if decisive(float(after_s[one, other])) >= decisive(float(load_s[slowest].max())):
            break
        microbatch[mine[one]], microbatch[other] = microbatch[other], slowest
    return microbatch


def lightest_first(work_s: FloatArray, microbatch: IntArray) -> IntArray:
    """The microbatches ``[samples]`` numbered by rising work."""
    order = np.argsort(decisive(loads_s(work_s, microbatch).max(axis=1)), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place[microbatch]


def loads_s(work_s: FloatArray, microbatch: IntArray) -> FloatArray:
    """Seconds of every microbatch on a stage of every module ``[microbatches, modules]``."""
    load_s = np.zeros((1 + int(microbatch.max()), work_s.shape[1]))
    np.add.at(load_s, microbatch, work_s)
    return load_s


@dataclass(frozen=True, slots=True)
class EncodersAhead:
    """Scheduler: 1F1B in which encoder stages run some forwards ahead, so that the LLM seldom waits for a heavy one.

    Attributes:
        num_ahead: forwards of an encoder stage beyond 1F1B's warm-up; each keeps its activations for longer.
    """

    handles_generators: ClassVar[bool] = True

    num_ahead: int = 4

    def __post_init__(self) -> None:
        require(self.num_ahead >= 0, "strategy.scheduler.num_ahead", self.num_ahead, "at least 0")

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The order of all actions of an iteration.

        Called after every ``assign``, with the same batch and layout.

        Args:
            shapes: the global batch.
            layout: where the stages are.
            assignment: the assigner's labels, perhaps another system's; ``chain_chunks`` refuses missing ones.
            profile: for the job and, where an order depends on them, for beliefs.

        Returns:
            What ``build_program`` makes of chunks and slots: units that share a forward and a backward, and when each
            lane runs these. What an action waits for, transfers and memory follow, and every executor refuses programs
            that leave out a sample, wait in a circle or exceed memory.

        Raises:
            IncompatibleError: for a layout or an assignment that there is no order for.
        """
        model = profile.job.model
        chunks = chain_chunks(model, shapes, layout, assignment, split_backward=False)
        # An assigner may let the LLM take a sample later than the encoder did; the backward then comes later, too.
        latest = backward_microbatch(model, shapes, assignment, chunks)
        count = np.zeros(common_dp(layout), np.int64)
        for rows, last in zip(chunks, latest, strict=True):
            np.maximum.at(count, rows.replica, last + 1)
        slots = []
        behind = stages_behind(layout, model.llm_index)
        for module, rows, last, stages in zip(model.modules, chunks, latest, behind, strict=True):
            warmup = stages + (self.num_ahead if module.is_encoder else 0)
            forward, _ = one_f_one_b(rows.microbatch[:, None], count[rows.replica][:, None], warmup)
            _, backward = one_f_one_b(last[:, None], count[rows.replica][:, None], warmup)
            slots.append(Slots(forward, backward))
        return build_program(model, layout, shapes, chunks, slots)
