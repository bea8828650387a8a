"""Predicted against published times: ``calibration.md``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median

import pandas as pd

from entrain_bench.answers.tables import run_actions
from entrain_bench.answers.text import markdown_table
from entrain_bench.base.files import write_atomically
from entrain_bench.figures._style import MODEL_ERROR
from entrain_bench.figures.forward_variability import microbatch_forward
from entrain_bench.lab.calibration.anchors import Anchor, Anchors, ForwardAnchor, KernelPoint, Product, load_anchors
from entrain_bench.records.cells import Cell
from entrain_bench.run.study import Output, Study, by_strategy

INTRODUCTION = """# Calibration

Predicted against published times, generated from runs (`entrain-bench figures calibration`). Every row of the first
table is a run of the suite's own: the Megatron-style planner with the published degrees, blocks spread evenly, 1F1B
(interleaved where there are virtual stages), the full program simulated. `experiments/anchors.yaml` holds the published
figures with source, date and all settings, and the split into halves, chosen before anything was fitted.
`entrain-bench calibrate` (`make calibration`) fits anew and prints the residuals. Nothing is fitted to a result of a
strategy.

What is fitted, and to what (`experiments/cluster/device`, provenance *fitted*):

| constant | fitted to | what it does |
|---|---|---|
| `gemm_half_flops` | published rates of single products | a product of n FLOPs takes (n + half) / limit |
| `attention_half_tokens` | published rates of attention kernels | the same for the length of sequences |
| `attention_half_head_dim` | the same | the same for the width of heads |
| `sustained_fraction` | the *fit* half of iterations (A40: ranges) | training computes slower than kernels alone |

Large-size limits stay what was measured or cited ([constants.md](constants.md)). One number a device is thus fitted to
whole iterations; it also takes up whatever no other constant stands for: power limits, unfused kernels, SMs that
communicate.
"""
UNDETERMINED = """## What remains undetermined

- **A40.** The axes of two figures are all there is. Any `sustained_fraction` in the interval that
  `entrain-bench calibrate` prints keeps all ranges, so absolute times on the A40 are known to about a sixth. Whether
  products, attention or memory are slow cannot be told apart: with memory at 0.35 of its bandwidth and products at 0.28
  of their peak the ranges hold as well.
- **Overlap.** That a framework hides tensor-parallel communication is known, how much of it is not; the table above
  says what it would change.
- **H200.** No iteration times are published for it with all settings; it has the H100's fitted constants (the same
  silicon) and its own measured product and copy.
- **Small work.** Published products go down to 0.07 GFLOPs and attention to 512 tokens; windows of 64 tokens lie
  outside.
- **Multimodal runs.** No anchor has an encoder but the A40's forwards.
"""
PLACES = ["group", "GPUs", "TP", "CP", "PP", "VP", "global batch", "microbatch", "published (s)", "predicted (s)"]
NOT_RUN = "not run"


def calibration_output() -> Output:
    """The document; the anchors are read once."""
    anchors = load_anchors()
    sweeps = [*anchors.runs]
    sweeps += [overrides for _, changed in anchors.toggled() for overrides in changed]

    def timelines(study: Study) -> list[list[Cell]]:
        return [group for anchor in anchors.forwards for group in by_strategy(study.cells(*anchor.overrides))]

    return Output("calibration", sweeps, lambda study: write_calibration(anchors, study), ["calibration.md"], timelines)


def write_calibration(anchors: Anchors, study: Study) -> str:
    """Write ``calibration.md``; returns what is missing from it, or wrong in what figures say of it."""
    times = {anchor: _predicted_s(anchor.overrides, study) for anchor in anchors.iterations}
    known = {anchor: time / anchor.published_s - 1.0 for anchor, time in times.items() if time is not None}
    line = model_error([*known.values()])
    parts = [
        INTRODUCTION,
        f"**{line[0].upper()}{line[1:]}**; on the test half alone: "
        f"{model_error([error for anchor, error in known.items() if anchor.half == 'test'])}.\n",
        _iterations(anchors.iterations, known),
        "## Weak scaling\n",
        _scaling(known),
        "## Forwards on the A40\n",
        _forwards(anchors.forwards, study),
        "## Kernels\n",
        _kernels(anchors, study),
        "## What the predictions rest on\n\nChange of the predicted time under one other "
        "assumption; none where the run has it so.\n",
        _sensitivity(anchors, study),
        UNDETERMINED,
        "## Sources\n",
        markdown_table(
            ["group", "what ran", "source"], [[each.name, each.framework, each.source] for each in anchors.groups]
        ),
    ]
    write_atomically(study.results.root / "calibration.md", "\n".join(parts).encode())
    problems = [study.problem(*overrides) for overrides in anchors.runs]
    if not any(problems) and line != MODEL_ERROR:
        problems.append(f"figures/_style.py: MODEL_ERROR must be {line!r}")
    return "; ".join(dict.fromkeys(filter(None, problems)))


def model_error(errors: Sequence[float]) -> str:
    """What figures say beside seconds, from relative errors."""
    if not errors:
        return "model error: not measured"
    sizes = [abs(error) for error in errors]
    count = f"{len(sizes)} published iteration time{'s' if len(sizes) > 1 else ''} of language models"
    return f"model error: median {100 * median(sizes):.1f}%, worst {100 * max(sizes):.1f}% over {count}"


def _predicted_s(overrides: tuple[str, ...], study: Study) -> float | None:
    (cell,) = study.cells(*overrides)
    record = study.results.read(cell.key)
    return record.metrics["iteration_time_s"] if record and record.status == "ok" else None


def _iterations(anchors: Sequence[Anchor], errors: dict[Anchor, float]) -> str:
    rows = []
    for anchor in anchors:
        own, error = anchor.settings, errors.get(anchor)
        sizes = (anchor.gpus, own.tp, own.cp, own.pp, own.virtual_stages, anchor.global_batch, own.microbatch_size)
        shown = [NOT_RUN, ""] if error is None else [f"{anchor.published_s * (1 + error):.2f}", f"{100 * error:+.1f}%"]
        name = f"{anchor.group.name} ({anchor.group.device.upper()})"
        rows.append([name, *map(str, sizes), f"{anchor.published_s:.2f}", *shown, anchor.half])
    return markdown_table([*PLACES, "error", "half"], rows, right=[*PLACES[1:], "error"])


def _scaling(errors: dict[Anchor, float]) -> str:
    """How times grow with the GPUs of the first run of a group, at the same batch for each."""
    rows = []
    for _, anchors in groupby(errors, key=lambda anchor: (anchor.group, anchor.settings)):
        first, *others = anchors
        for anchor in others:
            published = anchor.published_s / first.published_s - 1.0
            predicted = (1 + published) * (1 + errors[anchor]) / (1 + errors[first]) - 1.0
            shown = [f"{100 * published:+.1f}%", f"{100 * predicted:+.1f}%", f"{100 * (predicted - published):+.1f}"]
            rows.append([anchor.group.name, f"{first.gpus} to {anchor.gpus}", *shown])
    heading = ["group", "GPUs", "published", "predicted", "points apart"]
    return markdown_table(heading, rows, right=heading[1:])


def _forwards(anchors: Sequence[ForwardAnchor], study: Study) -> str:
    rows = []
    for anchor in anchors:
        low, high = anchor.published_ms
        actions: pd.DataFrame = run_actions(study.cells(*anchor.overrides), study.results)
        forwards = microbatch_forward(actions[actions["module"] == anchor.module]) if len(actions) else None
        # The mean of the module over its microbatches, all stages together.
        predicted = None if forwards is None else float(forwards["forward_ms"].mean())
        inside = "" if predicted is None else "yes" if low <= predicted <= high else "no"
        shown = NOT_RUN if predicted is None else f"{predicted:.0f}"
        rows.append([anchor.workload, anchor.model, anchor.module, f"{low:.0f} to {high:.0f}", shown, inside])
    heading = ["workload", "model", "module", "published (ms)", "predicted (ms)", "inside"]
    return markdown_table(heading, rows, right=heading[3:5])


def _kernels(anchors: Anchors, study: Study) -> str:
    rows = []
    for (device, what), listed in groupby(anchors.kernels, key=lambda each: (each[0], type(each[1]))):
        cases = [KernelPoint.of(*each, study.composer) for each in listed]
        errors = [abs(case.ratio(case.cluster.device) - 1.0) for case in cases]
        name = "products" if what is Product else "attention"
        rows.append([device, name, str(len(cases)), f"{100 * median(errors):.0f}%", f"{100 * max(errors):.0f}%"])
    heading = ["device", "kernels", "number", "median error", "largest error"]
    return markdown_table(heading, rows, right=heading[2:])


def _sensitivity(anchors: Anchors, study: Study) -> str:
    rows = []
    for anchor, changed in anchors.toggled():
        own = _predicted_s(anchor.overrides, study)
        times = [_predicted_s(overrides, study) for overrides in changed]
        shown = ["" if own is None or time is None else f"{100 * (time / own - 1):+.1f}%" for time in times]
        rows.append([f"{anchor.group.name}, {anchor.gpus} GPUs", *shown])
    return markdown_table(["run", *anchors.toggles], rows, right=[*anchors.toggles])
