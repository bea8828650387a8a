"""``harness=train`` of a Hugging Face model: its weights, random or published, and made-up samples of its sizes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

from entrain_bench.base.errors import ExecutionError, UserError
from entrain_bench.config.hub.files import HUB
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.device import dtype_on
from entrain_bench.train.runner.families import Family, family_of
from entrain_bench.train.runner.samples import UNLABELLED, HubData, Item, Sample
from entrain_bench.train.runner.stages import Stages
from entrain_bench.train.runner.trained import VALUE, HubStage, hub_runtime, with_optimizer
from entrain_bench.train.running.data import MadeUp
from entrain_bench.train.running.groups import GroupMaker
from entrain_bench.train.running.runtime import Runtime, optimizer_settings
from entrain_bench.train.settings import TrainSettings


def load_model(settings: TrainSettings, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The model with published weights, or with its own random ones of a seed; ``UserError`` if it cannot be read."""
    reference = settings.weights or settings.truth.model.name
    place, _, revision = reference.removeprefix(HUB).partition("@")
    options: dict[str, Any] = {"revision": revision} if revision else {}
    kernel = {"dtype": dtype, "attn_implementation": "sdpa"}
    model: Any
    try:
        if settings.weights:
            model = AutoModelForMultimodalLM.from_pretrained(place, **kernel, **options)
        else:
            torch.manual_seed(seed)
            make: Any = AutoModelForMultimodalLM.from_config
            model = make(AutoConfig.from_pretrained(place, **options), **kernel)
    except (OSError, ValueError, RuntimeError) as error:
        key = "harness.weights" if settings.weights else "model"
        line = " ".join(str(error).split())
        raise UserError(f"{key}={reference}: transformers cannot read it ({line})") from error
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


@dataclass(frozen=True, slots=True)
class MadeUpSamples:
    """Samples of the sizes of shapes: items with text between them, then the rest of the text, which is predicted."""

    family: Family
    content: MadeUp

    def data_of(self, shapes: SampleShapes) -> HubData:
        """The data of a batch."""
        sample = cache(partial(self.sample, shapes))
        return HubData(shapes, lambda _, index: sample(index), int(shapes.labelled_tokens.sum()))

    def sample(self, shapes: SampleShapes, index: int) -> Sample:
        """A sample by its position; ``UserError`` for sizes that the model's processor would not give."""
        words = torch.from_numpy(self.content.tokens(shapes, index))
        words = words.masked_fill(self.family.is_placeholder(words), 0)
        items = range(int(shapes.item_offsets[index]), int(shapes.item_offsets[index + 1]))
        if len(words) < len(items) - 1:
            raise UserError(
                f"workload: sample {shapes.name_of(index)} has {len(items)} items and {len(words)} text tokens, but a "
                "Hugging Face model needs one between two items"
            )
        made = []
        ids = list[Tensor]()
        labels = list[Tensor]()
        for number, item in enumerate(items):
            modality = shapes.modalities[int(shapes.item_modality[item])]
            sizes = int(shapes.item_encoder_tokens[item]), int(shapes.item_llm_tokens[item])
            wanted = Item(modality, {}, *sizes)
            grid = () if shapes.item_grids is None else tuple(shapes.item_grids[item].tolist())
            noise = partial(self.content.numbers, int(shapes.sample_ids[index]), number + 1)
            try:
                made.append(self.family.made_up(wanted, grid, noise))
            except ValueError as error:
                raise UserError(f"workload: sample {shapes.name_of(index)}: {error}") from error
            before = words[number - 1 : number] if number else words[:0]
            place = torch.full((sizes[1],), self.family.placeholder(modality))
            ids += [before, place]
            labels += [before, torch.full_like(place, UNLABELLED)]
        rest = words[max(len(items) - 1, 0) :]
        return Sample(torch.cat([*ids, rest]), torch.cat([*labels, rest]), tuple(made))


def published_runtime(
    layout: Layout, settings: TrainSettings, device: torch.device, seed: int, control: dist.ProcessGroup
) -> tuple[Runtime[HubStage], PreTrainedModel]:
    """The runtime of this rank, and the model, of which it keeps its part; collective. Raises as ``hub_runtime``."""
    model = load_model(settings, dtype_on(device, settings.dtype), seed)
    family = family_of(model)
    spec = settings.truth.model
    samples = MadeUpSamples(family, MadeUp(seed, spec.llm.config.vocab_size))
    maker = GroupMaker(control, settings.timeout_s, device)
    adam = optimizer_settings(settings)
    runtime = hub_runtime(Stages(family), spec, layout, adam, samples.data_of, maker, device)
    stages = {key: with_optimizer(trained, adam) for key, trained in runtime.stages.items()}
    return replace(runtime, stages=stages), model


def save_published(
    folder: Path, stages: Mapping[tuple[int, int], HubStage], model: PreTrainedModel, control: dist.ProcessGroup
) -> None:
    """Write all weights as transformers does; collective. ``ExecutionError`` if they cannot be written."""
    state: dict[str, Tensor] = {}
    for trained in stages.values():
        values = {name: value for name, value in trained.state().items() if name.endswith(VALUE)}
        state |= {name.removesuffix(VALUE): value.to(model.dtype) for name, value in values.items()}
        state |= trained.frozen()
    partial_folder = folder / "partial"
    try:
        writer = HuggingFaceStorageWriter(str(partial_folder), save_distributed=True, enable_consolidation=True)
        save(state, storage_writer=writer, process_group=control)
        if control.rank() == 0:
            whole: dict[str, Tensor] = {}
            for file in sorted(partial_folder.glob("*.safetensors")):
                whole |= load_file(file)
            model.save_pretrained(folder, state_dict=whole)
            shutil.rmtree(partial_folder)
        dist.barrier(group=control)
    except (OSError, CheckpointException) as error:
        raise ExecutionError(f"harness.save_weights={folder}: cannot be written ({error})") from error
