"""The interface of strategies: planner, assigner and scheduler, each replaceable."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol, runtime_checkable

from entrain_bench.balancing.experts import expert_variants
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.shardings import check_sharding, job_for, job_sharded_as, sharding_variants
from entrain_bench.balancing.variants import VARYING, Option, Variant, with_options
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.base.hosttime import each_replica_alone
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, check_assignment, pad_samples
from entrain_bench.program.layout import Layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.specs.job import Job
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes


def declares(part: object, feature: str) -> bool:
    """Return whether a planner, assigner or scheduler has a class variable such as ``handles_generators = True``."""
    return bool(getattr(part, feature, False))


class Planner(Protocol):
    """Chooses the layout, once, before training."""

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """Return the layout for ``profile.job``. A planner sees only the samples it draws from the profile.

        Raises:
            UserError: if no layout meets the request, fits the layers or fits in memory; it states the shortage.
        """
        ...


class Assigner(Protocol):
    """Assigns samples and items to replicas and microbatches, every iteration."""

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Return replica and microbatch of every item and sample of one global batch.

        An assigner with the class variable ``packs = True`` makes one sequence of each microbatch, which ``padding``
        does not lengthen.
        """
        ...


@runtime_checkable
class Observer(Assigner, Protocol):
    """An assigner that learns from executed iterations."""

    def observe(self, timeline: Timeline, profile: Profile) -> Assigner:
        """Return the assigner of later iterations. It may read only durations of actions, as a real system can."""
        ...


@runtime_checkable
class Drafter[Part](Protocol):
    """A part whose search is too slow to repeat for every layout or batch that a planner tries."""

    def draft(self) -> Part:
        """Return a quick assigner or scheduler whose programs need about the same memory."""
        ...


class Scheduler(Protocol):
    """Orders the passes on every rank, every iteration."""

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """Return the program of one iteration."""
        ...


class MakeProgram:
    """Makes the program that a strategy gives a batch under a layout; remembers the last, for a trial after a check."""

    def __init__(self, strategy: Strategy, profile: Profile) -> None:
        self._strategy = strategy
        self._profile = profile
        self._last: tuple[SampleShapes, Layout, Program] | None = None

    def __call__(self, shapes: SampleShapes, layout: Layout) -> Program:
        """Return the program of a batch."""
        if self._last is None or self._last[0] is not shapes or self._last[1] is not layout:
            self._last = shapes, layout, self._strategy.program(shapes, layout, self._profile)
        return self._last[2]

    @property
    def chooses_recomputation(self) -> bool:
        """Whether the scheduler chooses recomputation if the job leaves it free."""
        return declares(self._strategy.scheduler, "chooses_recomputation")

    def recomputes_under(self, layout: Layout) -> bool:
        """Return whether the scheduler chooses recomputation under a layout's options."""
        return declares(self._strategy.under(layout).scheduler, "chooses_recomputation")

    @property
    def variants(self) -> list[Variant]:
        """Variants of a plan that the tuner considers in addition to its layout."""
        shardings = sharding_variants(self._profile.job, self._strategy.planner) if self._strategy.free_sharding else ()
        return [*shardings, *expert_variants(self._profile.job)] + [
            Variant(option.key, value, partial(self._with_option, option, value))
            for option in self._strategy.options
            for value in option.values
        ]

    def sharded_as(self, job: Job, layout: Layout) -> Job:
        """Return the job that asks the planner for a plan's kind of sharding."""
        return job_sharded_as(job, self._strategy.planner, layout)

    def _with_option(self, option: Option, value: object, layout: Layout) -> Layout:
        """Return the plan with a value of an option; a scheduler that now chooses recomputation chooses all of it."""
        changed = option.chosen(layout, value)
        if self._profile.job.request.recompute is not None or not self.recomputes_under(changed):
            return changed
        modules = tuple(replace(placed, recompute=placed.recompute_whole) for placed in changed.modules)
        return replace(changed, modules=modules)

    @property
    def chooses_microbatches(self) -> bool:
        """Whether the assigner chooses the number of microbatches."""
        return declares(self._strategy.assigner, "chooses_microbatches")

    @cached_property
    def draft(self) -> MakeProgram:
        """A quicker maker whose programs need about the same memory; this maker if the scheduler has no draft."""
        scheduler = self._strategy.scheduler
        if not isinstance(scheduler, Drafter) or scheduler.draft() == scheduler:
            return self
        return MakeProgram(replace(self._strategy, drafts=True), self._profile)

    def has_same_parts(self, one: Layout, other: Layout) -> bool:
        """Return whether assigner and scheduler are the same under the options of two plans."""
        return self._strategy.under(one) == self._strategy.under(other)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A named planner, assigner and scheduler. Parts that support generators have ``handles_generators = True``."""

    name: str
    planner: Planner
    assigner: Assigner
    scheduler: Scheduler
    options: tuple[Option, ...] = ()  # of assigner and scheduler, that the tuner chooses as well as the layout
    free_sharding: bool = False  # whether the tuner chooses the kind of sharding, too
    drafts: bool = False  # whether the scheduler's draft takes its place, with any options

    def plan(self, profile: Profile) -> Layout:
        """Return the planner's layout; ``IncompatibleError`` for generators or sharding that a part does not take."""
        self.check_generators(profile.job.model)
        profile = profile.for_job(job_for(profile.job, self.planner))
        quick = replace(self, assigner=self.assigner.draft()) if isinstance(self.assigner, Drafter) else self
        layout = self.planner.plan(profile, MakeProgram(quick, profile))
        layout = _expect(Layout, layout, self.planner.plan)
        check_sharding(layout, profile.job, self.planner)
        return layout

    def under(self, layout: Layout) -> Strategy:
        """Return the strategy with the options that a layout was planned with."""
        chosen = self
        if layout.options:
            parts = {name: with_options(getattr(self, name), name, layout.options) for name in VARYING}
            chosen = replace(self, **parts)
        if self.drafts and isinstance(chosen.scheduler, Drafter):
            return replace(chosen, scheduler=chosen.scheduler.draft())
        return chosen

    def check_generators(self, model: ModelSpec) -> None:
        """Refuse a model with generators unless every part has ``handles_generators = True``."""
        for name, part in (("planner", self.planner), ("assigner", self.assigner), ("scheduler", self.scheduler)):
            if model.generators and not declares(part, "handles_generators"):
                raise IncompatibleError(
                    f"model={model.name}: has a generator ({model.generators[0].name}), which strategy/{name} "
                    f"{type(part).__name__} does not support. Use another strategy or model"
                )

    def _check_widths(self, layout: Layout) -> None:
        """Refuse groups of several widths unless assigner and scheduler have ``handles_widths = True``."""
        grouped = next((placed.module for placed in layout.modules if placed.widths), None)
        for name, part in (("assigner", self.assigner), ("scheduler", self.scheduler)):
            if grouped and not declares(part, "handles_widths"):
                raise IncompatibleError(
                    f"strategy/{name}: {type(part).__name__} knows replicas of fixed degrees, but {grouped} has groups "
                    "of several widths. Use the part of the planner's strategy"
                )

    def program(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Program:
        """Assign and schedule one global batch."""
        profile = profile.under(layout)
        self._check_widths(layout)
        chosen = self.under(layout)
        assignment = _expect(Assignment, chosen.assigner.assign(shapes, layout, profile), chosen.assigner.assign)
        multiple = profile.job.framework.padding_multiple
        if multiple is not None and not declares(chosen.assigner, "packs"):
            check_assignment(assignment, profile.job.model, layout, shapes)
            shapes = pad_samples(shapes, assignment.modules[profile.job.model.llm_index], multiple)
        with each_replica_alone(min(placed.dp for placed in layout.modules)):
            program = chosen.scheduler.schedule(shapes, layout, assignment, profile)
        return _expect(Program, program, chosen.scheduler.schedule)

    def observe(self, timeline: Timeline, profile: Profile) -> Strategy:
        """Return this strategy after it has observed an executed iteration."""
        if not isinstance(self.assigner, Observer):
            return self
        layout = timeline.program.layout
        chosen = with_options(self.assigner, "assigner", layout.options)
        return replace(self, assigner=chosen.observe(timeline, profile.under(layout)))


def _expect[T](kind: type[T], value: object, hook: Callable[..., object]) -> T:
    """Return a hook's value after a check of its class."""
    if not isinstance(value, kind):
        where = f"{inspect.getsourcefile(hook)}:{inspect.getsourcelines(hook)[1]}"
        raise UserError(f"{where}: {hook.__qualname__} returned {value!r}: must be an object of class {kind.__name__}")
    return value
