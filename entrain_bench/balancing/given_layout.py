"""A layout that was planned before, as a part of any strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.profile import Profile
from entrain_bench.program.layout import Layout, check_layout
from entrain_bench.program.plan_file import plan_fingerprint, read_plan


@dataclass(frozen=True, slots=True)
class GivenPlanner:
    """Takes the layout of a plan's file; nothing is measured or searched.

    Attributes:
        path: the file (``program.plan_file``).
    """

    handles_generators: ClassVar[bool] = True

    path: str

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:  # noqa: ARG002
        """Return the layout of the file.

        Raises:
            UserError: for a file that is no plan, and a layout that the job's model or cluster cannot take.
        """
        layout = read_plan(self.path).layout
        check_layout(layout, profile.job.model, profile.job.cluster)
        return layout

    def fingerprint(self) -> str:
        """Return the hash of the file, which is a part of a run's key."""
        return plan_fingerprint(self.path)
