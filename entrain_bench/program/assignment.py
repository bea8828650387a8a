"""Assignments: which replica and microbatch each unit of each module goes to, and the chunks that follow."""

from dataclasses import dataclass, replace

import numpy as np

from entrain_bench.base.arrays import IntArray, freeze
from entrain_bench.base.errors import UserError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.module_layers import Role
from entrain_bench.specs.shapes import SampleShapes

# Places in a replica's order; far beyond use, and small enough for the integer keys that programs are sorted by.
MAX_MICROBATCHES = 2**20


@dataclass(frozen=True, slots=True)
class ModuleAssignment:
    """Replica, and position in its order of microbatches (gaps allowed), of each unit of a module ``[units]``."""

    replica: IntArray
    microbatch: IntArray

    def __post_init__(self) -> None:
        freeze(self.replica, self.microbatch)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Replica and microbatch of every unit of every module, in the model's order."""

    modules: tuple[ModuleAssignment, ...]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Sets of units that share one autograd graph (a microbatch or a part of it), by replica, microbatch and part."""

    # Labels ``[chunks]``.
    replica: IntArray
    microbatch: IntArray
    part: IntArray
    # The units of each chunk, CSR.
    offsets: IntArray
    members: IntArray

    def __len__(self) -> int:
        return len(self.replica)

    def units(self, chunk: int) -> IntArray:
        """The units of a chunk, in order."""
        return self.members[self.offsets[chunk] : self.offsets[chunk + 1]]


def same_microbatches(
    model: ModelSpec,
    shapes: SampleShapes,
    replica: IntArray,
    encoder: IntArray,
    llm: IntArray,
    encoder_replica: IntArray | None = None,
    generator_replica: IntArray | None = None,
) -> Assignment:
    """Return an assignment of samples with their items; generators share the LLM's microbatches ``[samples]``."""
    labels = {
        Role.ENCODER: (replica if encoder_replica is None else encoder_replica, encoder),
        Role.LLM: (replica, llm),
        Role.GENERATOR: (replica if generator_replica is None else generator_replica, llm),
    }
    modules = []
    for module in model.modules:
        samples = module.owners(shapes, module.units(shapes))
        of_sample, microbatch = labels[module.role]
        modules.append(ModuleAssignment(of_sample[samples], microbatch[samples]))
    return Assignment(tuple(modules))


def check_assignment(assignment: Assignment, model: ModelSpec, layout: Layout, shapes: SampleShapes) -> None:
    """Raise ``UserError`` naming the sample whose label is missing or out of range."""
    if len(assignment.modules) != len(model.modules):
        raise UserError(f"assignment: {len(assignment.modules)} modules, the model has {len(model.modules)}")
    for labels, module, placed in zip(assignment.modules, model.modules, layout.modules, strict=True):
        units = module.units(shapes)
        owner = module.owners(shapes, units)
        given = min(len(labels.replica), len(labels.microbatch))
        if given != len(units) or len(labels.replica) != len(labels.microbatch):
            lost = f"; sample {shapes.name_of(owner[given])} has none" if given < len(units) else ""
            raise UserError(
                f"assignment of {module.name}: {len(labels.replica)} replica and {len(labels.microbatch)} microbatch "
                f"labels for {len(units)} units{lost}"
            )
        limits = (("replica", labels.replica, placed.copies), ("microbatch", labels.microbatch, MAX_MICROBATCHES))
        for name, label, limit in limits:
            wrong = np.flatnonzero((label < 0) | (label >= limit))
            if wrong.size:
                raise UserError(
                    f"assignment of {module.name}: sample {shapes.name_of(owner[wrong[0]])} has "
                    f"{name}={label[wrong[0]]}: must be 0..{limit - 1}"
                )


def pad_samples(shapes: SampleShapes, labels: ModuleAssignment, multiple: int) -> SampleShapes:
    """Return samples whose LLM sequences have the length of the longest of their microbatch, rounded up to a multiple.

    ``labels`` are those of the LLM. Collators of training stacks pad so (transformers' ``padding="longest"`` and
    ``pad_to_multiple_of``).
    """
    key = labels.replica.astype(np.int64) * MAX_MICROBATCHES + labels.microbatch
    _, microbatch = np.unique(key, return_inverse=True)
    longest = np.zeros(1 + int(microbatch.max(initial=-1)), np.int64)
    np.maximum.at(longest, microbatch, shapes.llm_tokens)
    padded = -(-longest // multiple) * multiple
    return replace(shapes, padding_tokens=padded[microbatch] - shapes.llm_tokens)


def group_chunks(
    module: ModuleSpec, shapes: SampleShapes, labels: ModuleAssignment, part: IntArray | None = None
) -> Chunks:
    """Group a module's units into chunks by replica, microbatch and part ``[units]``; None keeps microbatches whole."""
    num_microbatches = 1 + int(labels.microbatch.max(initial=0))
    num_parts = 1
    # One integer key sorts several times faster than lexsort; units keep their order inside a chunk.
    key = labels.replica.astype(np.int64) * num_microbatches + labels.microbatch
    if part is not None:
        num_parts += int(part.max(initial=0))
        key = key * num_parts + part
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.concatenate((np.ones(min(1, len(key)), bool), key[1:] != key[:-1])))
    offsets = np.append(first, len(key))
    chunk_key = key[offsets[:-1]]
    return Chunks(
        chunk_key // (num_microbatches * num_parts),
        chunk_key // num_parts % num_microbatches,
        chunk_key % num_parts,
        offsets,
        module.units(shapes)[order],
    )
