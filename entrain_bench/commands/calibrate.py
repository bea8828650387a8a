"""``entrain-bench calibrate [DEVICE ...]``: fit cost constants to published times and print the residuals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from entrain_bench.base.errors import require, unknown_choice
from entrain_bench.commands.watch import say
from entrain_bench.config.compose import Composer
from entrain_bench.config.grammar import Request, Verb, own
from entrain_bench.lab.calibration import fit
from entrain_bench.lab.calibration.anchors import Anchors, KernelPoint, Product, load_anchors

EXIT_DIFFERS = 1
# Values of a constant of which an interval is searched.
TRIED = np.arange(0.05, 1.0, 0.005)


@dataclass(frozen=True, slots=True)
class Keys:
    """Own keys."""

    anchors: str | None = own(None, "file of published times; null: experiments/anchors.yaml")


VERB = Verb(Keys, words="devices to fit; without any, every device with published times", options=(), examples=["a40"])


def main(request: Request[Keys]) -> int:
    """Fit devices to their kernels and the fit half of their published times; print constants and residuals.

    Returns 0, or 1 if ``experiments/cluster/device`` has another constant; ``UserError`` for wrong anchors.
    """
    path = Path(request.keys.anchors) if request.keys.anchors else None
    require(path is None or path.is_file(), "anchors", request.keys.anchors, "a file")
    anchors, composer = load_anchors(path), Composer()
    devices = [*dict.fromkeys(group.device for group in anchors.groups)]
    for name in request.words:
        if name not in devices:
            raise unknown_choice("device", name, devices)
    same = [_calibrate(device, anchors, composer) for device in request.words or devices]
    composer.save()
    return 0 if all(same) else EXIT_DIFFERS


def _calibrate(name: str, anchors: Anchors, composer: Composer) -> bool:
    """Fit a device, print what comes out; returns whether its YAML says the same."""
    say(f"{name}: making programs")
    kernels = [KernelPoint.of(device, kernel, composer) for device, kernel in anchors.kernels if device == name]
    forwards = [fit.ForwardPoint.of(each, composer) for each in anchors.forwards if each.group.device == name]
    iterations = [fit.IterationPoint.of(each, composer) for each in anchors.iterations if each.group.device == name]
    configured = (forwards[0] if forwards else iterations[0]).truth.cluster.device
    products = [case for case in kernels if isinstance(case.kernel, Product)]
    attention = [case for case in kernels if not isinstance(case.kernel, Product)]
    found, fitted = configured, dict[str, float]()
    for cases, start in (
        (products, fit.PRODUCTS),
        (attention, fit.ATTENTION),
        ([case for case in iterations if case.anchor.half == "fit"], fit.ITERATIONS),
        (forwards, fit.FORWARDS),
    ):
        if cases:
            found, fitted = fit.fit_device(found, [case.ratio for case in cases], start), fitted | start
    for constant in fitted:
        own, value = getattr(configured, constant), getattr(found, constant)
        note = "" if own == value else f", but device/{name}.yaml says {own:g}"
        print(f"{name}: {constant} {value:g}{note}")
    for what, kind in (("products", products), ("attention kernels", attention)):
        if kind:
            errors = 100 * np.abs([case.ratio(found) - 1.0 for case in kind])
            print(f"  {len(kind)} {what}: median error {np.median(errors):.0f}%, largest {errors.max():.0f}%")
    for case in iterations:
        anchor, error = case.anchor, case.ratio(found) - 1.0
        print(
            f"  {anchor.half:4} {anchor.group.name}, {anchor.gpus} GPUs, TP {anchor.settings.tp} PP "
            f"{anchor.settings.pp}: published {anchor.published_s:.2f} s, {100 * error:+.1f}%"
        )
    for point in forwards:
        published, (low, high) = point.anchor, point.anchor.published_ms
        print(
            f"  {published.workload} {published.model} {published.module}: published {low:.0f} to {high:.0f} ms, "
            f"{point.predicted_ms(found):.0f} ms"
        )
    for constant in fit.FORWARDS if forwards else ():
        least, most = fit.interval(forwards, found, constant, TRIED)
        print(f"  every range holds for {constant} from {least:.3f} to {most:.3f}")
    return all(getattr(configured, constant) == getattr(found, constant) for constant in fitted)
