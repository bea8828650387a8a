"""Supported combinations, found by trying: families of models, strategies, devices; a reason in each empty cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from entrain_bench.answers.labels import cost_source, strategy_facts
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.hub.files import BundledModel, bundled_models
from entrain_bench.program.layout import Layout, check_layout
from entrain_bench.run.experiment import RunContext, prepare
from entrain_bench.specs.cluster import DeviceSpec
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.parse import parse
from entrain_bench.train.settings import check_trained

YES = "yes"
JOB = (
    *("workload=synthetic", "model=tiny", "cluster=tiny", "global_batch=64", "microbatch_size=1"),
    *("layout.tp=1", "layout.dp=null", "tuning_budget=4"),
)
EXPERTS = "+model.modules.llm.experts={count: 4, top_k: 2, ffn_hidden_size: 64}"
# Blocks that generate an image of 64 tokens.
GENERATOR = (
    "+model.modules.picture={role: generator, source: made up, modalities: [image], num_layers: 2, hidden_size: 64, "
    "num_heads: 4, num_kv_heads: 4, head_dim: 16, ffn_hidden_size: 128, item_tokens: 64, "
    "embed_gemms: [{k: 64, n: 64}], head_gemms: [{k: 64, n: 64}]}"
)
# Columns of the table of strategies: overrides of the job that are tried.
FEATURES: Mapping[str, tuple[str, ...]] = {
    "one encoder": (),
    "two encoders": ("model=tiny_av", "workload=synthetic_av"),
    "generator": (GENERATOR,),
    "experts": (EXPERTS,),
    "EP 2": (EXPERTS, "layout.ep=2"),
    "adapters": ("adapter.rank=4",),
}
# One device of each kind, by a cluster that has it.
CLUSTERS = (
    *("a40x8", "a100x8", "a800x8", "h100x8", "h200x8", "h800x8", "h20x8", "b200x8", "b300x8", "gb200x72"),
    *("l40sx8", "rtx4090x8", "rtx6000x8", "mi300xx8"),
)
type Table = tuple[list[str], list[list[str]]]


class Reason(str):
    """The cell of a refusal: why."""

    __slots__ = ()


def support_tables() -> Iterator[tuple[str, Callable[[], Table], str]]:
    """Yield the title of every table, its maker and a note."""
    limited = [model.name for model in bundled_models().values() if model.has_family_sizes]
    note = f"Image sizes limited as in the family, because the model's own are not published: {', '.join(limited)}."
    yield "Model families", families_table, f"{note} Sources of all sizes: entrain-bench ls models."
    yield "Strategies", strategies_table, "Widths: whether samples of one batch may use groups of different sizes."
    yield "Devices", devices_table, ""


def families_table() -> Table:
    """Return a row for every family of bundled models: an example, whether it simulates and training has its layers."""
    rows = dict[str, list[str]]()
    for name, model in bundled_models().items():
        family = str(model.config["model_type"])
        if family not in rows:
            rows[family] = [family, name, *_mapped(model)]
    return ["family", "example", "simulate", "layers train", "tokens of"], [rows[family] for family in sorted(rows)]


def _mapped(model: BundledModel) -> list[str]:
    try:
        spec = ModelSpec.from_config(model.values)
    except UserError as error:
        return [Reason(error), "", ""]
    encoded = dict.fromkeys(name for encoder in spec.encoders for name in encoder.config.modalities)
    return [YES, attempt(lambda: _check_training(spec)), ", ".join(["text", *encoded])]


def _check_training(spec: ModelSpec) -> None:
    for module in spec.modules:
        FrameworkOptions().check_executable(module, 1, "train")


def strategies_table() -> Table:
    """Return a row for every strategy: which features a small job of it may have, whether it trains, its widths."""
    composer = Composer()
    rows = []
    for facts in strategy_facts():
        planned: list[tuple[RunContext, Layout]] = []
        cells = [_tried(composer, facts.name, overrides, planned) for overrides in FEATURES.values()]
        trains = attempt(partial(_check_trained, *planned[0])) if planned else cells[0]
        widths = any(len(placed.degrees) > 1 for _, layout in planned for placed in layout.modules)
        rows.append([facts.name, *cells, trains, YES if widths else "fixed"])
    return ["strategy", *FEATURES, "train", "widths of groups"], rows


def _tried(
    composer: Composer, strategy: str, overrides: tuple[str, ...], planned: list[tuple[RunContext, Layout]]
) -> str:
    def plan() -> None:
        setting = prepare(composer.run((*JOB, f"strategy={strategy}", *overrides)))
        layout = setting.plan()
        check_layout(layout, setting.job.model, setting.job.cluster)
        setting.strategy.program(setting.source.batch(0, setting.job.global_batch, 0), layout, setting.profile)
        planned.append((setting, layout))

    return attempt(plan)


def _check_trained(setting: RunContext, layout: Layout) -> None:
    check_trained(layout, setting.job.model, setting.job.framework)


def devices_table() -> Table:
    """Return a row for every device: where its constants come from, and the rate of its 8-bit products."""
    composer = Composer()
    rows = []
    for name in CLUSTERS:
        values = composer.run((f"cluster={name}",)).cluster
        device = parse(DeviceSpec, values["device"], "cluster.device")
        eight = attempt(partial(FrameworkOptions(precision="fp8").check_device, device))
        rows.append([device.name, cost_source(values), device.attention_kernel, eight])
    return ["device", "constants", "attention", "precision=fp8"], rows


def attempt(action: Callable[[], object]) -> str:
    """Return ``YES``, or the reason of a refusal up to its first full stop."""
    try:
        action()
    except UserError as error:
        return Reason(str(error).partition(". ")[0])
    return YES


def with_notes(rows: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[str]]:
    """Return rows with numbers in place of reasons, and the reasons in their order."""
    reasons = dict.fromkeys(cell for row in rows for cell in row if isinstance(cell, Reason))
    numbers: dict[str, str] = {reason: f"no ({number})" for number, reason in enumerate(reasons, start=1)}
    return [[numbers.get(cell, cell) for cell in row] for row in rows], [*reasons]
