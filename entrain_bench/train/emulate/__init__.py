"""Executor 3: one device runs every pass with its real shapes; what it took is placed on the simulated clock."""

from entrain_bench.train.emulate.emulator import Emulator

__all__ = ["Emulator"]
