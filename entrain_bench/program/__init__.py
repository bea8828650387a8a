"""Programs: for every lane an ordered list of actions, with dependencies derived from samples."""

from entrain_bench.program.build import Slots, build_program, reorder
from entrain_bench.program.columns import ActionView, Pass, Program, recompute_chunks

__all__ = ["ActionView", "Pass", "Program", "Slots", "build_program", "recompute_chunks", "reorder"]
