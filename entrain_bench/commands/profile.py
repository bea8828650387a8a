"""``entrain-bench profile model=NAME [KEY=VALUE ...]``: measure layer and communication times of this device."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from entrain_bench.commands.watch import say
from entrain_bench.config.compose import Composer
from entrain_bench.config.grammar import Request, Verb
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.profiling.settings import ProfileSettings
from entrain_bench.train.settings import quiet, refuse_generators

VERB = Verb(ProfileSettings, ("model",), examples=["model=tiny", "model=tiny tokens=[16,256] tp=[1]"])


def main(request: Request[ProfileSettings]) -> int:
    """Profile the device, or resume an unfinished profile; return 0.

    ``UserError`` for bad options, a model that cannot be profiled, or a file of another profile.
    """
    settings = request.keys
    composer = Composer(request.config_dir)
    model = ModelSpec.from_config(composer.run(request.overrides).model)
    composer.save()
    refuse_generators(model, "entrain-bench profile")
    if settings.device == "cpu":
        # megatron-core takes a GPU where it sees one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")
    with quiet():
        # Imported once the options are known to be good: torch takes seconds.
        import torch

        from entrain_bench.train.device import find_device
        from entrain_bench.train.profiling.recorder import ProfileRecorder, default_path, dtype_of, ranks_of

    device = find_device(settings.device)
    torch.set_num_threads(settings.threads)
    ranks = ranks_of(settings, device)
    path = Path(settings.output) if settings.output else default_path(model, device, dtype_of(settings, device))
    session = ProfileRecorder.begin(model, settings, path, device)
    total = len(session.packs()) + len(ranks)
    say(f"profiling {model.name} on {device}, to be written to {path}")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("profile", total=total)

        def advance(what: str) -> None:
            progress.update(task, advance=1, description=what)

        session.run(advance)
    for what in session.left_out:
        say(f"left out: {what}: longer than half of point_s={settings.point_s:g} s, or more than the memory")
    print(f"{path}: cluster/device=profiled cluster.device.path={path}")
    return 0
