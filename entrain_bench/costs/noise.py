"""Noise of executed passes: random factors on their durations, which no strategy can predict."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import numpy as np

from entrain_bench.base.arithmetic import GOLDEN, mix, uniform
from entrain_bench.base.arrays import FloatArray
from entrain_bench.program import Program

# Half of the width of a uniform distribution in its standard deviations.
HALF_WIDTH = 3.0**0.5


@dataclass(frozen=True, slots=True)
class ActionNoise:
    """Independent factors on the durations of forwards and backwards, uniform around 1.

    Attributes:
        relative_std: their standard deviation, in [0, 0.5].
        seed: with what an action is, and the samples of its batch, it fixes the action's factor.
    """

    relative_std: float = 0.0
    seed: int = 0

    def factors(self, program: Program) -> FloatArray:
        """The factor of every action; 1 for steps at the end of the iteration ``[actions]``."""
        factors = np.ones(program.num_actions)
        if not self.relative_std:
            return factors
        batch = int(program.shapes.sample_ids[0])
        for index, (module, chunks) in enumerate(zip(program.model.modules, program.chunks, strict=True)):
            mine = slice(int(program.first_action[index]), int(program.first_action[index + 1]))
            chunk = program.chunk[mine]
            # The batch makes it another one in every iteration.
            bits = np.full(len(chunk), np.uint64((crc32(module.name.encode()) << 31) ^ self.seed))
            labels = (np.full(len(chunk), batch), chunks.replica[chunk], chunks.microbatch[chunk], chunks.part[chunk])
            for label in (*labels, program.stage[mine], program.kind[mine]):
                bits = mix(bits ^ (label.astype(np.uint64) + np.uint64(1)) * GOLDEN)
            factors[mine] = 1.0 + self.relative_std * HALF_WIDTH * (2.0 * uniform(bits) - 1.0)
        return factors
