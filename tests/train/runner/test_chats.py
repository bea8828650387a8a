"""Samples are what a processor makes: answers alone are labelled, and all ranks treat bad rows the same."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch
from torch.nn import functional

import entrain_bench as eb
from entrain_bench.base.errors import ExecutionError
from entrain_bench.train.runner.chats import NOTHING, Chats, messages_of
from entrain_bench.train.runner.families import family_of
from entrain_bench.train.runner.runner import ProgramRunner
from entrain_bench.train.runner.samples import UNLABELLED
from support.train.hub import LEARNING_RATE, conversations, save_config, tiny_model, tiny_processor
from support.train.ranks import run_ranks
from support.train.runs import config_from_json, config_to_json

NUM_ROWS, BAD = 12, (5, 6)


def rows_of(bad: tuple[int, ...] = ()) -> datasets.Dataset:
    features = datasets.Dataset.from_list(conversations(NUM_ROWS, bad))
    return features.cast_column("images", datasets.List(datasets.Image()))


def chats_of(on_bad_sample: str, bad: tuple[int, ...] = ()) -> Chats:
    chats = Chats(rows_of(bad), tiny_processor(), on_bad_sample=on_bad_sample)
    chats.bind(family_of(tiny_model("qwen2_5_vl")))
    return chats


def test_only_answers_and_their_ends_are_labelled() -> None:
    chats = chats_of("fail")
    decode = chats.processor.tokenizer.decode
    for row, answers in ((0, ["picture 0"]), (1, ["picture 1picture 1", "yes"])):
        sample = chats.sample(row)
        labelled = sample.labels != UNLABELLED
        text = "".join(decode([token]) for token in sample.ids[labelled].tolist())
        assert text == "".join(f"{answer}<|im_end|>\n" for answer in answers)
        assert (sample.labels[labelled] == sample.ids[labelled]).all()
        (item,) = sample.items
        assert item.llm_tokens == int((sample.ids == chats.family.config.image_token_id).sum())
        assert item.encoder_tokens == 4 * item.llm_tokens == len(item.inputs["pixel_values"])


def test_images_of_a_row_fill_its_parts_in_order() -> None:
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "a"}, {"type": "image", "text": None}]
    row = {"messages": [{"role": "user", "content": parts}], "images": ["first", "second"]}
    (message,) = messages_of(row)
    assert [part.get("image", part.get("text")) for part in message["content"]] == ["first", "a", "second"]


def batches(rank: int, on_bad_sample: str) -> tuple[list[int], list[int], dict[str, int], str]:
    """Identities and text tokens of a batch of all rows, counts, and the error."""
    chats = chats_of(on_bad_sample, BAD)
    try:
        shapes = chats.batch(0, NUM_ROWS, seed=0)
    except ExecutionError as error:
        return [], [], {}, f"{rank}"[:0] + str(error)
    assert chats.num_labelled(shapes) == sum(chats.sample(int(name)).num_labelled for name in shapes.sample_ids)
    return shapes.sample_ids.tolist(), shapes.text_tokens.tolist(), dict(chats.counts), ""


@pytest.mark.wide
@pytest.mark.parametrize("on_bad_sample", ["skip", "substitute", "fail"])
def test_all_ranks_treat_a_bad_row_the_same(on_bad_sample: str) -> None:
    first, second = run_ranks(batches, 2, on_bad_sample)
    assert first == second
    names, _, counts, error = first
    if on_bad_sample == "fail":
        assert error.startswith(("row 5: UnidentifiedImageError", "row 6: UnidentifiedImageError"))
        return
    good = {*range(NUM_ROWS)} - {*BAD}
    # Row 7 stands for both: it is the first after them that can be read.
    assert sorted(names) == sorted([*good, *(2 * [NOTHING if on_bad_sample == "skip" else 7])])
    assert counts == {on_bad_sample: 2 if on_bad_sample == "skip" else 3}


STRATEGIES = {
    "megatron": ("layout.pp=2", "layout.dp=2"),
    "entrain": ("layout.dp=null",),
    "braid": ("layout.dp=null",),
    "dynapipe": ("layout.dp=null",),
    "fsdp": ("layout.dp=null",),
}
STEPS = 3


def train(_: int, configs: list[str], on_bad_sample: str) -> tuple[list[list[float]], float]:
    """Losses of every configuration, and the first one by the model's own forward over rows of the batch."""
    losses = []
    for config in configs:
        model, chats = tiny_model("qwen2_5_vl"), chats_of(on_bad_sample, BAD)
        runner = ProgramRunner(config_from_json(config), model, chats)
        optimizer = torch.optim.SGD(runner.parameters(), lr=LEARNING_RATE)
        own = []
        for step in range(STEPS):
            optimizer.zero_grad()
            own.append(runner.step(step))
            optimizer.step()
        assert chats.counts[on_bad_sample] >= len(BAD)
        losses.append(own)
    model, chats = tiny_model("qwen2_5_vl"), chats_of(on_bad_sample, BAD)
    total, count = 0.0, 0
    for name in chats.batch(0, 8, seed=0).sample_ids.tolist():
        if name == NOTHING:
            continue
        sample = chats.sample(name)
        inputs = {key: torch.cat([item.inputs[key] for item in sample.items]) for key in sample.items[0].inputs}
        places = chats.family.is_placeholder(sample.ids)[None].long()
        with torch.no_grad():
            logits = model(input_ids=sample.ids[None], mm_token_type_ids=places, **inputs).logits[0, :-1]
        total += float(functional.cross_entropy(logits, sample.labels[1:], ignore_index=UNLABELLED, reduction="sum"))
        count += sample.num_labelled
    return losses, total / count


@pytest.mark.wide
@pytest.mark.parametrize("on_bad_sample", ["skip", "substitute"])
def test_bad_rows_change_no_loss_of_any_strategy(on_bad_sample: str, tmp_path: Path) -> None:
    save_config("qwen2_5_vl", tmp_path)
    common = ("cluster=tiny", "workload=synthetic", "global_batch=8", "microbatch_size=2", "layout.ep=1", "tuning=own")
    configs = [
        config_to_json(eb.compose(f"model=hf:{tmp_path}", *common, "layout.tp=1", f"strategy={name}", *layout))
        for name, layout in STRATEGIES.items()
    ]
    for losses, wanted in run_ranks(train, 4, configs, on_bad_sample, stay=False):
        assert losses[0][0] == pytest.approx(wanted, abs=1e-5)
        assert losses[0][-1] < losses[0][0]
        for own in losses[1:]:
            assert own == pytest.approx(losses[0], abs=1e-5)
