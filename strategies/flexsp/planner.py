"""Weights sharded over all ranks, one stage, groups of every width; TP and recomputation by trial runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from entrain_bench.balancing.beliefs import packed_iteration_s
from entrain_bench.balancing.candidates import Candidate, by_estimate
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.options import check_least
from entrain_bench.balancing.planning import recompute_choices
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import plane_layout
from entrain_bench.balancing.tuning import chosen_layout
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

type Key = tuple[int, tuple[bool, ...]]


@dataclass(frozen=True, slots=True)
class FlexPlanner:
    """Every TP and recomputation; DP and CP are the widths that samples take.

    Attributes:
        num_trials: best estimates that fit memory and run a profiled batch on trial.
    """

    handles_generators: ClassVar[bool] = True

    num_trials: int = 8

    def __post_init__(self) -> None:
        check_least(self, "strategy.planner", 1, "num_trials")

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The fastest of the most promising candidates that fit memory.

        Raises:
            IncompatibleError: for more than one stage, or optimizer states shared by parts of the ranks.
        """
        job = profile.job
        if job.request.pp not in (None, 1):
            raise IncompatibleError(f"layout.pp={job.request.pp}: must be 1 or null with sharded weights")
        if job.framework.encoder_optimizers > 1:
            raise IncompatibleError(
                f"encoder_optimizers={job.framework.encoder_optimizers}: must be 1 with sharded weights"
            )
        batch, known = profile.draw(job.global_batch), dict[Key, Candidate | UserError]()
        return chosen_layout(
            profile,
            lambda each: by_estimate(_candidates(each, batch, make_program, known)),
            make_program,
            self.num_trials,
        )


def _candidates(
    profile: Profile, batch: SampleShapes, make_program: MakeProgram, known: dict[Key, Candidate | UserError]
) -> Iterator[Candidate]:
    """Every TP and choice of recomputation, with the believed seconds of a batch's program."""
    job = profile.job
    free = replace(job, request=replace(job.request, cp=None, pp=1, dp=None), microbatch_size=1)
    found, problem = False, None
    for tp in sorted({degrees.tp for degrees in free.degrees()}):
        for recompute in recompute_choices(job):
            key = tp, recompute
            if key not in known:
                known[key] = _candidate(profile, batch, make_program, tp, recompute)
            each = known[key]
            if isinstance(each, Candidate):
                found = True
                yield each
            else:
                problem = problem or each
    if problem is not None and not found:
        raise problem


def _candidate(
    profile: Profile, batch: SampleShapes, make_program: MakeProgram, tp: int, recompute: tuple[bool, ...]
) -> Candidate | UserError:
    job, whole = profile.job, [(len(module.layers),) for module in profile.job.model.modules]
    try:
        layout = plane_layout(job, tp, whole, False, recompute, 1, sharded=True)
        program = make_program(batch, layout)
        count = 1 + int(program.chunks[job.model.llm_index].microbatch.max())
        return Candidate(packed_iteration_s(program, profile), replace(layout, num_microbatches=count))
    except UserError as error:
        return error.with_traceback(None)
