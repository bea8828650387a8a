"""Multimodal models: modules, their layers, and the computation, memory and output size of each layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, freeze
from entrain_bench.base.errors import IncompatibleError, UserError, require
from entrain_bench.specs.adapters import Adapter, adapted_layer, check_targets, named_products
from entrain_bench.specs.layer import BF16_BYTES, Layer
from entrain_bench.specs.module_layers import (
    UNFUSED,
    ModuleConfig,
    Role,
    alternate_splits,
    build_layers,
    check_numerics,
    has_dense_layers,
    language_head,
    mlp_of_block,
    token_embedding,
)
from entrain_bench.specs.parse import check_keys, check_mapping, parse
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import MAX_TOKENS, TokenRules, parse_images
from entrain_bench.specs.unet import check_unet, unet_layers

MAX_LAYERS = 1000  # layers of a module: planners compare every pair of them
MAX_SIZE = 2**24  # sizes of a layer, of which two are multiplied for its parameters
# The part of a block that recomputation covers: all of it, or its MLP with the norm before it.
FULL = "full"
SELECTIVE = "selective"
WORDS_MULTIPLE = 128  # Megatron-LM pads a vocabulary to a multiple of this times TP (make-vocab-size-divisible-by)
# Names in ``freeze``: an encoder with its projector (``vision.projector``), and all weights except adapters.
PROJECTOR = "projector"
EVERYTHING = "all"
NO_ADAPTER = Adapter()
TRAINING_FLOPS = 3.0  # A backward takes twice the forward's model FLOPs


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """A module as a sequence of layers: an input embedding, the blocks, a head (projector, or LM head with loss)."""

    name: str
    role: Role
    config: ModuleConfig
    layers: tuple[Layer, ...]
    cross_entropy: str = UNFUSED  # how an LLM computes its loss
    kinds: tuple[Layer, ...] = field(init=False)
    layer_kind: IntArray = field(init=False, compare=False)
    _counts: dict[tuple[int, ...], FloatArray] = field(init=False, default_factory=dict, repr=False, compare=False)
    _padded: dict[int, ModuleSpec] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {layer.kind: layer for layer in self.layers}
        number = {name: index for index, name in enumerate(by_name)}
        object.__setattr__(self, "kinds", tuple(by_name.values()))
        object.__setattr__(self, "layer_kind", np.array([number[layer.kind] for layer in self.layers]))

    @property
    def is_encoder(self) -> bool:
        """Whether the LLM consumes the module's output."""
        return self.role is Role.ENCODER

    @property
    def per_item(self) -> bool:
        """Whether the module works on items (encoders, generators) rather than samples."""
        return self.role is not Role.LLM

    @property
    def sharded_sizes(self) -> dict[str, int]:
        """Sizes that tensor parallelism must divide, by name; empty if it does not split the module.

        A vocabulary is not among them, because it can be ``padded``.
        """
        config = self.config
        if config.unet is not None:
            return {}
        sizes = {"heads": config.num_heads, "key-value heads": config.num_kv_heads}
        if has_dense_layers(config):
            sizes["feed-forward width"] = config.ffn_hidden_size
        if config.experts is not None:
            sizes["feed-forward width of experts"] = config.experts.ffn_hidden_size
            sizes["feed-forward width of experts for images"] = config.experts.visual_ffn_hidden_size
            sizes["feed-forward width of shared experts"] = config.experts.shared_ffn_hidden_size
        if self.role is Role.LLM:
            return sizes
        # Row-parallel products split the channels of the rows that were folded into k.
        ends = ("embed_gemms", self.layers[0], 0), ("head_gemms", self.layers[-1], config.hidden_size)
        for name, layer, channels in ends:
            for index, gemm in enumerate(layer.gemms):
                sizes[f"channels of {name}[{index}]"] = (channels or gemm.k) if gemm.row_parallel else gemm.n
                channels = gemm.n
        return sizes

    def splits_into(self, tp: int) -> bool:
        """Whether a tensor-parallel degree splits the module."""
        return all(size % tp == 0 for size in self.sharded_sizes.values())

    def padded(self, tp: int) -> ModuleSpec:
        """The module with a vocabulary that ``tp`` ranks can share; itself if ``tp`` divides it already.

        Padding to a multiple of ``WORDS_MULTIPLE * tp`` is Megatron-LM's, which also pads vocabularies that ``tp``
        divides.
        """
        words = self.config.vocab_size
        if words % tp == 0:
            return self
        if tp not in self._padded:
            multiple = WORDS_MULTIPLE * tp
            config = replace(self.config, vocab_size=-(-words // multiple) * multiple)
            first, *inner, last = self.layers
            first = token_embedding(config).learning_as(first)
            last = language_head(config, self.cross_entropy).learning_as(last)
            self._padded[tp] = replace(self, config=config, layers=(first, *inner, last))
        return self._padded[tp]

    def weight_shards(self, tp: int) -> int:
        """Parts that tensor parallelism splits the weights into."""
        return tp if self.config.unet is None else 1

    def weight_copies(self, tp: int, replicas: int) -> int:
        """Ranks that hold the same weights, of ``replicas`` groups of ``tp`` ranks."""
        return replicas * tp // self.weight_shards(tp)

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        tied = self.config.tied_embeddings and self.config.vocab_size * self.config.hidden_size
        return sum(layer.parameters for layer in self.layers) - int(tied)

    @property
    def active_parameters(self) -> float:
        """Number of parameters that a token meets: all of them but those of experts that it is not sent to."""
        return self.parameters - sum(layer.idle_parameters for layer in self.layers)

    @property
    def learning_parameters(self) -> int:
        """Number of parameters that learn."""
        if all(layer.learns for layer in self.layers):
            return self.parameters  # a tied embedding counts once
        return sum(layer.trained_parameters for layer in self.layers)

    @property
    def frozen_parameters(self) -> int:
        """Number of parameters that do not."""
        return self.parameters - self.learning_parameters

    @property
    def has_backward(self) -> bool:
        """Whether a gradient reaches the module's first layers or stops inside it."""
        return any(layer.backward_share > 0 for layer in self.layers)

    @property
    def work_share(self) -> float:
        """Return product FLOPs of both passes relative to a module without frozen layers."""
        kinds = self.kinds
        needed = np.array([1.0 + 2.0 * layer.backward_share for layer in kinds])[self.layer_kind]
        each = [sum(gemm.k * gemm.n * gemm.rows_per_token for gemm in layer.gemms) for layer in kinds]
        flops = np.array(each)[self.layer_kind]
        return float((flops * needed).sum() / (flops * 3.0).sum())

    def frozen(self, passes_gradients: bool, with_projector: bool = False) -> ModuleSpec:
        """Return the module with frozen weights, except a projector unless ``with_projector``.

        ``passes_gradients``: an earlier module learns.
        """
        keeps = self.is_encoder and not with_projector
        fixed = len(self.layers) - 1 if keeps else len(self.layers)
        still = tuple(layer.frozen(passes_gradients) for layer in self.layers[:fixed])
        return replace(self, layers=(*still, *self.layers[fixed:]))

    def adapted(self, passes_gradients: bool, rank: int, names: Collection[str]) -> ModuleSpec:
        """Return the module with frozen weights and adapters; ``UserError`` for a name that no product has."""
        known = {name for layer in self.kinds for name, _ in named_products(self.config, layer)}
        check_targets(names, self.name, known)
        first, *inner, last = self.layers
        blocks = [adapted_layer(layer.frozen(passes_gradients=True), self.config, rank, names) for layer in inner]
        layers = (first.frozen(passes_gradients), *blocks, last.frozen(passes_gradients=True))
        return replace(self, layers=layers)

    def selectively_recomputed(self) -> ModuleSpec:
        """Return the module with blocks that recompute only the MLP and its norm; a U-Net has no such blocks."""
        if self.config.unet is not None:
            return replace(self, layers=tuple(replace(layer, recomputed=False) for layer in self.layers))
        layers = []
        for layer in self.layers:
            if layer.recomputed and layer.backward_share > 0:
                part = mlp_of_block(self.config, layer)
                layer = replace(layer, remade=part if layer.learns else part.frozen(passes_gradients=True))
            layers.append(layer)
        return replace(self, layers=tuple(layers))

    def cut_bytes(self, layers_per_stage: Sequence[int]) -> tuple[IntArray, IntArray]:
        """Return bytes per token (bf16) from each stage to the next, and of gradients back, if any ``[stages - 1]``."""
        last = np.cumsum(layers_per_stage)[:-1] - 1
        size = BF16_BYTES * np.array([self.layers[layer].hidden_size for layer in last], np.int64)
        needed = np.cumsum([layer.backward_share > 0 for layer in self.layers]) > 0
        return size, size * needed[last]

    def lengths(self, shapes: SampleShapes, units: IntArray) -> IntArray:
        """Sequence length of each of the given units: encoder tokens of items, LLM tokens of samples."""
        if self.role is Role.GENERATOR:
            return np.full(len(units), self.config.item_tokens)
        return (shapes.item_encoder_tokens if self.is_encoder else shapes.llm_tokens)[units]

    def units(self, shapes: SampleShapes) -> IntArray:
        """Return the indices of units that the module must process exactly once: its modalities' items, or samples."""
        return shapes.items_of(self.config.modalities) if self.per_item else np.arange(len(shapes))

    def owners(self, shapes: SampleShapes, units: IntArray) -> IntArray:
        """Sample of each of the given units."""
        return shapes.item_sample[units] if self.per_item else units

    def kind_counts(self, layers_per_stage: Sequence[int]) -> FloatArray:
        """How many layers of each kind every stage holds ``[stages, kinds]``; read-only."""
        split = tuple(layers_per_stage)
        if split not in self._counts:
            counts = np.zeros((len(split), len(self.kinds)))
            np.add.at(counts, (np.repeat(np.arange(len(split)), split), self.layer_kind), 1.0)
            freeze(counts)
            self._counts[split] = counts
        return self._counts[split]

    def forward_flops(self, lengths: IntArray) -> FloatArray:
        """Model FLOPs of a forward through the whole module, per sequence."""
        total = np.zeros(len(lengths))
        for count, kind in zip(np.bincount(self.layer_kind), self.kinds, strict=True):
            total += count * kind.forward_flops(lengths)
        return total


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Encoders that feed one LLM, and generators that it feeds, in that order."""

    name: str
    modules: tuple[ModuleSpec, ...]
    tokens: TokenRules

    @property
    def encoders(self) -> tuple[ModuleSpec, ...]:
        """The encoder modules."""
        return tuple(module for module in self.modules if module.is_encoder)

    @property
    def generators(self) -> tuple[ModuleSpec, ...]:
        """The generator modules."""
        return self.modules[self.llm_index + 1 :]

    @property
    def llm_index(self) -> int:
        """Position of the LLM among the modules: encoders come before it, generators after it."""
        return len(self.encoders)

    @property
    def llm(self) -> ModuleSpec:
        """The LLM module."""
        return self.modules[self.llm_index]

    @property
    def module_groups(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the modules that DistTrain lays out as one: encoders, LLM, generators."""
        roles = [[i for i, module in enumerate(self.modules) if module.role is role] for role in Role]
        return tuple(tuple(unit) for unit in roles if unit)

    def with_cross_entropy(self, cross_entropy: str) -> ModelSpec:
        """The model with another last layer of its LLM: one of ``CROSS_ENTROPIES``."""
        *layers, last = self.llm.layers
        head = language_head(self.llm.config, cross_entropy).learning_as(last)
        changed = replace(self.llm, layers=(*layers, head), cross_entropy=cross_entropy)
        return replace(self, modules=tuple(changed if module is self.llm else module for module in self.modules))

    def with_frozen(self, names: Sequence[str], adapter: Adapter = NO_ADAPTER) -> ModelSpec:
        """Return the model with adapters, and with the named modules and projectors frozen (``freezable``)."""
        modules: list[ModuleSpec] = []
        for module in self.modules:
            # Encoders run first, however many there are.
            before = [] if module.is_encoder else modules
            passes = any(layer.trains for other in before for layer in other.layers)
            adapted = adapter.names_in(module.name, self.llm.name)
            projector = {f"{module.name}.{PROJECTOR}", EVERYTHING} & {*names}
            if adapted:
                modules.append(module.adapted(passes, adapter.rank, adapted))
            elif module.name in names or projector:
                modules.append(module.frozen(passes, with_projector=bool(projector)))
            else:
                modules.append(module)
        return replace(self, modules=tuple(modules))

    @property
    def freezable(self) -> list[str]:
        """Names that ``freeze`` may have: modules, encoders with their projector, and everything."""
        projectors = [f"{module.name}.{PROJECTOR}" for module in self.encoders]
        return [*(module.name for module in self.modules), *projectors, EVERYTHING]

    def with_recomputation(self, granularity: str) -> ModelSpec:
        """The model with blocks that recomputation covers as ``FrameworkOptions.recompute_granularity`` says."""
        if granularity == FULL:
            return self
        return replace(self, modules=tuple(module.selectively_recomputed() for module in self.modules))

    def training_flops(self, shapes: SampleShapes) -> float:
        """Return the model FLOPs per iteration: three times a forward's, minus the FLOPs that frozen layers save."""
        unneeded = 0.0
        for module in self.modules:
            lengths = module.lengths(shapes, module.units(shapes))
            for count, kind in zip(np.bincount(module.layer_kind), module.kinds, strict=True):
                if not kind.learns:
                    unneeded += float(count * kind.unneeded_flops(lengths).sum())
        return TRAINING_FLOPS * self.forward_flops(shapes) - unneeded

    def module(self, name: str) -> ModuleSpec:
        """The module of that name."""
        return next(module for module in self.modules if module.name == name)

    def forward_flops(self, shapes: SampleShapes) -> float:
        """Model FLOPs of one forward over all samples."""
        return float(sum(m.forward_flops(m.lengths(shapes, m.units(shapes))).sum() for m in self.modules))

    def check_shapes(self, shapes: SampleShapes) -> None:
        """Raise ``IncompatibleError`` for a modality without encoder, ``UserError`` for a sample beyond the context."""
        encoded = {name for module in self.encoders for name in module.config.modalities}
        for index in np.unique(shapes.item_modality):
            if (name := shapes.modalities[index]) not in encoded:
                only = f"model={self.name} encodes only {sorted(encoded)}"
                raise IncompatibleError(f"workload: has {name} items, but {only}")
        longest = int(np.argmax(shapes.llm_tokens))
        length = int(shapes.llm_tokens[longest])
        limit = self.llm.config.context_tokens
        if length > limit:
            most = f"model={self.name} takes at most {limit} (model.modules.{self.llm.name}.context_tokens)"
            raise UserError(f"workload: sample {shapes.name_of(longest)} has {length} LLM tokens, {most}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Parse a model YAML: ``name``, ``modules`` by name, ``tokens``; ``UserError`` names a wrong key."""
        check_keys(cls, config, "model")
        modules = [
            _build_module(str(name), parse(ModuleConfig, values, f"model.modules.{name}"))
            for name, values in check_mapping(config["modules"], "model.modules").items()
        ]
        llms = [module for module in modules if module.role is Role.LLM]
        names = [module.name for module in modules]
        require(len(llms) == 1, "model.modules", names, "encoders and exactly one llm, and generators")
        modules.sort(key=lambda module: [*Role].index(module.role))
        return cls(str(config["name"]), tuple(modules), _token_rules(config["tokens"], llms[0]))


def _token_rules(values: Any, llm: ModuleSpec) -> TokenRules:
    where = "model.tokens"
    if "context_tokens" in check_mapping(values, where):
        raise UserError(f"{where}.context_tokens: must be given as model.modules.{llm.name}.context_tokens")
    given = {**values, "context_tokens": llm.config.context_tokens}
    if given.get("images") is not None:
        given["images"] = parse_images(given["images"], f"{where}.images")
    return parse(TokenRules, given, where)


def _build_module(name: str, config: ModuleConfig) -> ModuleSpec:
    where = f"model.modules.{name}"
    if config.role == Role.GENERATOR:
        _require_size(config, "item_tokens", where, MAX_TOKENS)
    if config.role != Role.LLM:
        require(bool(config.modalities), f"{where}.modalities", list(config.modalities), "at least one modality")
    if config.unet is not None:
        require(config.role == Role.GENERATOR, f"{where}.unet", "...", "absent: only a generator may be a U-Net")
        check_unet(config.unet, f"{where}.unet")
        layers = unet_layers(config.unet, config.item_tokens, alternate_splits(config.embed_gemms))
        return ModuleSpec(name, Role.GENERATOR, config, layers)
    _require_size(config, "num_layers", where, MAX_LAYERS)
    for key in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size"):
        if key != "ffn_hidden_size" or has_dense_layers(config):
            _require_size(config, key, where, MAX_SIZE)
    dense = () if config.experts is None else config.experts.dense_layers
    for key, listed in (
        ("full_attention_layers", config.full_attention_layers),
        ("linear_attention.layers", config.linear_attention.layers if config.linear_attention else ()),
        ("experts.dense_layers", dense),
    ):
        inside = all(0 <= layer < config.num_layers for layer in listed)
        require(inside, f"{where}.{key}", [*listed], f"layers in 0..{config.num_layers - 1}")
    if config.experts is not None:
        most = config.experts.count
        require(config.experts.top_k <= most, f"{where}.experts.top_k", config.experts.top_k, f"at most count={most}")
    divides = config.num_heads % config.num_kv_heads == 0
    require(divides, f"{where}.num_kv_heads", config.num_kv_heads, f"a divisor of num_heads={config.num_heads}")
    check_numerics(config, where)
    if config.role == Role.LLM:
        _require_size(config, "vocab_size", where, MAX_SIZE)
        _require_size(config, "context_tokens", where, MAX_TOKENS)
    return ModuleSpec(name, Role(config.role), config, build_layers(config))


def _require_size(config: ModuleConfig, key: str, where: str, most: int) -> None:
    value = getattr(config, key)
    require(1 <= value <= most, f"{where}.{key}", value, f"at least 1, at most {most}")
