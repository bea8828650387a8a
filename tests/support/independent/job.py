"""What strategies decide, and what follows from it: passes, their times, what they need and how many bytes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from entrain_bench.program import Pass, Program
from support.independent.layers import (
    BF16,
    FP32,
    Layer,
    LayerTimes,
    frozen,
    layers_of,
    mlp_of,
)
from support.independent.machine import Machine

ROLES = ("encoder", "llm", "generator")
# What ranks with the same weights share out besides optimizer states: gradients, or weights as well.
GRADIENTS = ("zero2",)
WEIGHTS = ("zero3", "zero3_kept", "hybrid")


class Action(NamedTuple):
    """A pass of a chunk on a stage; sorts as programs number theirs."""

    module: int
    kind: Pass
    chunk: int
    stage: int


@dataclass(frozen=True)
class Chunk:
    """Units of a module that share a pass: samples of the LLM, items of others."""

    replica: int
    microbatch: int
    part: int
    units: list[int]


@dataclass
class Job:
    """A model on a machine, laid out and cut into chunks.

    Attributes:
        model, cluster: YAML, resolved.
        framework: settings by name.
        program: read for its layout, chunks and lane orders only.
    """

    model: Mapping[str, Any]
    cluster: Mapping[str, Any]
    framework: Mapping[str, Any]
    program: Program
    _times: dict[tuple[int, int], list[LayerTimes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = self.model["modules"]
        names = sorted(named, key=lambda name: ROLES.index(named[name]["role"]))
        self.configs = [named[name] for name in names]
        self.layers: list[list[Layer]] = []
        for name, config in zip(names, self.configs, strict=True):
            layers = layers_of(config, self.framework["cross_entropy"])
            if name in self.framework["freeze"]:
                before = [] if config["role"] == "encoder" else self.layers
                layers = frozen(config["role"], layers, any(each.learns for other in before for each in other))
            self.layers.append(layers)
        self.llm = next(index for index, config in enumerate(self.configs) if config["role"] == "llm")
        self.machine = Machine(self.cluster, self.framework)
        self.placed = self.program.layout.modules
        self.chunks = [
            [
                Chunk(int(replica), int(microbatch), int(part), rows.members[lo:hi].tolist())
                for replica, microbatch, part, lo, hi in zip(
                    rows.replica, rows.microbatch, rows.part, rows.offsets[:-1], rows.offsets[1:], strict=True
                )
            ]
            for rows in self.program.chunks
        ]
        shapes = self.program.shapes
        bounds = list(zip(shapes.item_offsets[:-1].tolist(), shapes.item_offsets[1:].tolist(), strict=True))
        self.owner = [sample for sample, (lo, hi) in enumerate(bounds) for _ in range(lo, hi)]
        self.item_tokens = shapes.item_encoder_tokens.tolist()
        self.handed_tokens = shapes.item_llm_tokens.tolist()
        texts = shapes.text_tokens.tolist()
        self.sample_tokens = [
            text + sum(self.handed_tokens[lo:hi]) for text, (lo, hi) in zip(texts, bounds, strict=True)
        ]
        self.orders = [self._order(lane) for lane in range(self.program.layout.num_lanes)]
        self.lanes: dict[Action, list[int]] = {}
        for lane, order in enumerate(self.orders):
            for action in order:
                self.lanes.setdefault(action, []).append(lane)
        self.split = {action.module for action in self.lanes if action.kind is Pass.WEIGHT}

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient as ranks reduce it, in a bf16 model."""
        return {"fp32": FP32, "bf16": BF16}[str(self.framework["grad_dtype"])]

    def _order(self, lane: int) -> list[Action]:
        entries = slice(self.program.lane_offsets[lane], self.program.lane_offsets[lane + 1])
        return [action for action in map(self.named, self.program.lane_actions[entries].tolist()) if action]

    def named(self, number: int) -> Action | None:
        """Description of a program's action; None for steps."""
        program = self.program
        if program.chunk[number] < 0:
            return None
        labels = (int(column[number]) for column in (program.module, program.kind, program.chunk, program.stage))
        module, kind, chunk, stage = labels
        return Action(module, Pass(kind), chunk, stage)

    def ranks(self, action: Action) -> list[int]:
        """Ranks that run an action."""
        placed, replica = self.placed[action.module], self.chunks[action.module][action.chunk].replica
        if not placed.widths:
            return placed.ranks[replica, action.stage].tolist()  # type: ignore[no-any-return]
        (tp, cp), first = self.group(action.module, replica)
        return sorted(placed.ranks[:, action.stage].ravel().tolist())[first : first + tp * cp]

    def group(self, module: int, replica: int) -> tuple[tuple[int, int], int]:
        """TP and CP of a group of ranks, and its first place among the ranks of a stage."""
        placed = self.placed[module]
        if not placed.widths:
            return (placed.tp, placed.cp), -1
        size = placed.ranks[:, 0].size
        every = [
            (own, at) for own in placed.widths for at in range(0, size, own[0] * own[1]) if at + own[0] * own[1] <= size
        ]
        return every[replica]

    def degrees(self, action: Action) -> tuple[int, int]:
        """TP and CP of the ranks that run an action."""
        return self.group(action.module, self.chunks[action.module][action.chunk].replica)[0]

    def lengths(self, module: int, chunk: Chunk) -> list[int]:
        """Sequence lengths of a chunk's units."""
        role = self.configs[module]["role"]
        if role == "generator":
            return [self.configs[module]["item_tokens"]] * len(chunk.units)
        tokens = self.sample_tokens if role == "llm" else self.item_tokens
        return [tokens[unit] for unit in chunk.units]

    def splits_states(self, module: int) -> bool:
        """Whether tensor-parallel ranks split a module's hidden states by tokens."""
        encoders = self.framework["encoder_sp"] or self.configs[module]["role"] != "encoder"
        return bool(self.framework["sequence_parallel"] and encoders)

    def sequence_parts(self, module: int, cp: int) -> int:
        """Parts that a module's sequences are cut into by context parallelism."""
        whole = self.configs[module]["role"] == "encoder" and not self.framework["encoder_cp"]
        return 1 if whole else cp

    def stage_layers(self, module: int, stage: int) -> range:
        """Layers of a stage."""
        split = self.placed[module].layers_per_stage
        return range(sum(split[:stage]), sum(split[: stage + 1]))

    def layer_times(self, module: int, chunk: int) -> list[LayerTimes]:
        """Times of all layers of a module on a chunk; its passes with recomputation."""
        if (module, chunk) not in self._times:
            lengths = self.lengths(module, self.chunks[module][chunk])
            (tp, cp), _ = self.group(module, self.chunks[module][chunk].replica)
            kinds: dict[str, LayerTimes] = {}
            again: dict[str, LayerTimes] = {}
            for layer in self.layers[module]:
                if layer.kind not in kinds:
                    machine = Machine(self.cluster, {**self.framework, "sequence_parallel": self.splits_states(module)})
                    parts, split = self.sequence_parts(module, cp), module in self.split
                    meeting = self.meeting(module, chunk)
                    times = machine.layer_times(layer, lengths, tp, parts, split, meeting)
                    once_more = times
                    if self.framework["recompute_granularity"] == "selective" and layer.is_block:
                        part = replace(mlp_of(self.configs[module]), learns=layer.learns)
                        once_more = machine.layer_times(part, lengths, tp, parts, split=False)
                    backward = times.backward + once_more.forward, times.backward_comm + once_more.forward_comm
                    kinds[layer.kind] = times
                    again[layer.kind] = replace(times, backward=backward[0], backward_comm=backward[1])
            remade = self.remade_layers(module, chunk)
            self._times[module, chunk] = [
                (again if place in remade and layer.gradients else kinds)[layer.kind]
                for place, layer in enumerate(self.layers[module])
            ]
        return self._times[module, chunk]

    def meeting(self, module: int, chunk: int) -> tuple[float, list[list[int]]] | None:
        """Tokens of which a chunk's ranks have an even share for their experts, and the ranks of all groups."""
        placed = self.placed[module]
        if placed.ep == 1:
            return None
        groups = []
        for stage in range(placed.pp):
            ranks = self.sharing(module, stage)
            groups += [ranks[first : first + placed.ep] for first in range(0, len(ranks), placed.ep)]
        together = self.partners(module, chunk)
        span = max(1, placed.ep // placed.cp)
        tokens = sum(sum(self.lengths(module, self.chunks[module][other])) for other in together)
        return tokens / span, groups

    def partners(self, module: int, chunk: int) -> list[int]:
        """Chunks of a module whose experts meet, itself among them."""
        span = max(1, self.placed[module].ep // self.placed[module].cp)

        def place(number: int) -> tuple[int, int, int]:
            one = self.chunks[module][number]
            return one.replica // span, one.microbatch, one.part

        every = range(len(self.chunks[module])) if span > 1 else [chunk]
        return [other for other in every if place(other) == place(chunk)]

    def took(self, action: Action) -> float:
        """Seconds of an action; those that meet last as long as the slowest, and as its longest communication."""
        alike = [action]
        if action.kind is not Pass.WEIGHT and self.placed[action.module].ep > 1:
            alike = [action._replace(chunk=other) for other in self.partners(action.module, action.chunk)]
        return max(sum(self.seconds(each)) - self.own_comm_s(each) for each in alike) + self.comm_s(action)

    def remade_layers(self, module: int, chunk: int) -> set[int]:
        """Blocks that a chunk's backward runs forward once more: all, or of each stage the first so many."""
        placed, found = self.placed[module], set[int]()
        for stage in range(placed.pp):
            blocks = [layer for layer in self.stage_layers(module, stage) if self.layers[module][layer].is_block]
            count = int(self.program.remade[module][chunk, stage]) if self.program.remade else 0
            found |= set(blocks if placed.recompute else blocks[:count])
        return found

    def seconds(self, action: Action) -> list[float]:
        """Seconds of each of the stage's layers in an action, what they send each other included."""
        times = self.layer_times(action.module, action.chunk)
        mine = [times[layer] for layer in self.stage_layers(action.module, action.stage)]
        return [sum(each.of(action.kind)) for each in mine]

    def comm_s(self, action: Action) -> float:
        """Communication inside an action, of the action that has most of those that meet."""
        if action.kind is Pass.WEIGHT or self.placed[action.module].ep == 1:
            return self.own_comm_s(action)
        every = self.partners(action.module, action.chunk)
        return max(self.own_comm_s(action._replace(chunk=other)) for other in every)

    def own_comm_s(self, action: Action) -> float:
        """Communication of its layers inside an action."""
        times = self.layer_times(action.module, action.chunk)
        mine = [times[layer] for layer in self.stage_layers(action.module, action.stage)]
        return sum(each.of(action.kind)[1] for each in mine)

    def parameters(self, module: int, stage: int) -> list[float]:
        """Parameters on a rank of each of a stage's layers; an embedding that is there already is not held again."""
        placed, held = self.placed[module], self.layers[module]
        away = 1 - 1 / placed.ep
        counted = [
            float(held[layer].parameters) - (held[layer].experts[2] * away if held[layer].experts else 0.0)
            for layer in self.stage_layers(module, stage)
        ]
        if self.is_tied(module) and self.ends_meet(module) and stage == placed.pp - 1:
            counted[-1] -= held[0].parameters
        return [each / placed.tp for each in counted]

    def learning(self, module: int, stage: int) -> list[float]:
        """Those that learn."""
        learns = [self.layers[module][layer].learns for layer in self.stage_layers(module, stage)]
        return [each * still for each, still in zip(self.parameters(module, stage), learns, strict=True)]

    def divided(self, module: int, stage: int) -> list[float]:
        """Those of experts that ranks divide."""
        placed, held = self.placed[module], self.layers[module]
        experts = [held[layer].experts for layer in self.stage_layers(module, stage)]
        return [each[2] / placed.tp / placed.ep if each and placed.ep > 1 else 0.0 for each in experts]

    def of_experts(self, module: int, stage: int) -> float:
        """Those of a stage that learn."""
        learns = [self.layers[module][layer].learns for layer in self.stage_layers(module, stage)]
        return sum(each * still for each, still in zip(self.divided(module, stage), learns, strict=True))

    def sharing(self, module: int, stage: int) -> list[int]:
        """Ranks that would hold, or that share out, the same weights; the first of each tensor-parallel group."""
        placed = self.placed[module]
        return [rank for block in placed.ranks[:, stage].tolist() for rank in block[:: placed.tp]]

    def shares_weights(self, module: int) -> bool:
        """Whether passes gather weights."""
        return self.placed[module].sharding in WEIGHTS

    def shares_gradients(self, module: int) -> bool:
        """Whether every backward scatters its gradients."""
        return self.shares_weights(module) or self.placed[module].sharding in GRADIENTS

    def gathers(self, action: Action) -> bool:
        """Whether a forward gathers weights: every one, or those of the first chunks if gathered weights stay."""
        if self.placed[action.module].sharding != "zero3_kept":
            return self.shares_weights(action.module)
        places = [(chunk.microbatch, chunk.part) for chunk in self.chunks[action.module]]
        return places[action.chunk] == min(places)

    def nodes(self, module: int) -> int:
        """Nodes that hold a module's weights once each."""
        ranks = {rank // self.cluster["gpus_per_node"] for rank in self.placed[module].ranks.ravel().tolist()}
        return len(ranks) if self.placed[module].sharding == "hybrid" else 1

    def is_tied(self, module: int) -> bool:
        """Whether embedding and head are one tensor."""
        return bool(self.configs[module].get("tied_embeddings", False))

    def ends_meet(self, module: int) -> bool:
        """Whether the first and the last stage are on the same ranks."""
        ranks = self.placed[module].ranks
        return ranks[:, 0].tolist() == ranks[:, -1].tolist()

    @cached_property
    def offload_s(self) -> dict[Action, float]:
        """Seconds that the host link adds to an offloaded module's last forward and first backward on a lane."""
        added: dict[Action, float] = {}
        bandwidth = self.cluster["device"]["host_bandwidth_bytes_per_s"]
        for order in self.orders:
            for module, placed in enumerate(self.placed):
                mine = [action for action in order if action.module == module]
                forwards, backwards = ([a for a in mine if a.kind is way] for way in (Pass.FORWARD, Pass.BACKWARD))
                if not placed.offload or not forwards or not backwards:
                    continue
                if order.index(forwards[-1]) > order.index(backwards[0]):
                    continue
                stages = sorted({action.stage for action in mine})
                held = sum(sum(self.parameters(module, stage)) for stage in stages)
                for action in (forwards[-1], backwards[0]):
                    added[action] = max(added.get(action, 0.0), BF16 * held / bandwidth)
        return added

    def needs(self) -> Iterator[tuple[Action, Action, int]]:
        """Every dependency: what needs, what it needs, bytes that travel."""
        for module, chunks in enumerate(self.chunks):
            placed = self.placed[module]
            for number, chunk in enumerate(chunks):
                tokens = sum(self.lengths(module, chunk))
                for stage in range(1, placed.pp):
                    left = self.layers[module][: self.stage_layers(module, stage)[0]]
                    size = BF16 * left[-1].hidden * tokens
                    here, before = (Action(module, Pass.FORWARD, number, each) for each in (stage, stage - 1))
                    yield here, before, size
                    wanted = any(layer.gradients for layer in left)
                    yield before._replace(kind=Pass.BACKWARD), here._replace(kind=Pass.BACKWARD), size * wanted
                if self.configs[module]["role"] != "encoder":
                    last = Action(module, Pass.BACKWARD, number, placed.pp - 1)
                    yield last, last._replace(kind=Pass.FORWARD), 0
                for stage in range(placed.pp) if module in self.split else ():
                    late = Action(module, Pass.WEIGHT, number, stage)
                    yield late, late._replace(kind=Pass.BACKWARD), 0
        yield from self._needs_between_modules()

    def _needs_between_modules(self) -> Iterator[tuple[Action, Action, int]]:
        llm, deepest = self.llm, self.placed[self.llm].pp - 1
        ahead, back = Pass.FORWARD, Pass.BACKWARD
        width = BF16 * self.configs[llm]["hidden_size"]
        wanted = [any(layer.gradients for layer in layers) for layers in self.layers]
        holder = {sample: number for number, chunk in enumerate(self.chunks[llm]) for sample in chunk.units}
        for module, chunks in enumerate(self.chunks):
            if module == llm:
                continue
            last = self.placed[module].pp - 1
            for number, chunk in enumerate(chunks):
                handed: dict[int, int] = {}
                for item in chunk.units:
                    partner = holder[self.owner[item]]
                    handed[partner] = handed.get(partner, 0) + self.handed_tokens[item]
                for partner, tokens in handed.items():
                    if self.configs[module]["role"] == "encoder":
                        yield Action(llm, ahead, partner, 0), Action(module, ahead, number, last), tokens * width
                        size = tokens * width * wanted[module]
                        yield Action(module, back, number, last), Action(llm, back, partner, 0), size
                    else:
                        yield Action(module, ahead, number, 0), Action(llm, ahead, partner, deepest), tokens * width
                        size = tokens * width * wanted[llm]
                        yield Action(llm, back, partner, deepest), Action(module, back, number, 0), size
