"""``make gpu-check``: does training work on this machine's GPUs, how fast, and how near are predictions.

Runs one step after the other and leaves one folder, report.md, numbers.json, logs, and an archive of it to be sent to
others. Steps that passed or were skipped are not repeated by a second call on the same devices, with the same options
and code. Without a GPU it checks ranks over gloo.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter

from entrain_bench.base.errors import UserError, explain, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.config.tree import config_tree
from entrain_bench.lab.gpu_check.folder import archive, claim
from entrain_bench.lab.gpu_check.identity import identity_of, origin_of
from entrain_bench.lab.gpu_check.machine import Machine, read_machine
from entrain_bench.lab.gpu_check.privacy import Scrubber
from entrain_bench.lab.gpu_check.processes import last_line, run_python
from entrain_bench.lab.gpu_check.report import page
from entrain_bench.lab.gpu_check.result import FAILED, Finding, StepResult
from entrain_bench.lab.gpu_check.settings import Setup
from entrain_bench.lab.gpu_check.steps import STEPS, Check
from entrain_bench.train.settings import DEVICES

COMMAND = "make gpu-check"
MACHINE_S = 300.0
EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str]) -> int:
    """Run the steps that are not done; 1 if one failed, 2 for bad options."""
    parser = argparse.ArgumentParser(
        prog="python -m entrain_bench.lab.gpu_check", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, help="the report's folder; default: results/gpu-check-<date>")
    parser.add_argument("--device", default="auto", choices=DEVICES, help="auto: GPUs where there are any")
    parser.add_argument("--devices", type=int, help="how many: 1, 2, 4 or 8; default: all GPUs, or 2 ranks on a CPU")
    parser.add_argument("--steps", help=f"which of {','.join(STEPS)}; default: all")
    parser.add_argument("--all", action="store_true", help="all strategies and workloads; default: a part of them")
    parser.add_argument("--again", action="store_true", help="repeat steps that passed or were skipped, too")
    options = parser.parse_args(arguments)
    try:
        names = chosen_steps(options.steps)
        folder = options.output or Path("results") / f"gpu-check-{datetime.now(UTC).date().isoformat()}"
        check = prepare(folder, options.device, options.devices, options.all)
        results = run_steps(check, names, again=options.again)
        sent = archive(folder, Scrubber.of_this_machine())
    except UserError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"interrupted; finished steps are kept in {folder}", file=sys.stderr)
        return EXIT_INTERRUPTED
    for result in results:
        print(f"{result.name:12} {result.finding.verdict:8} {result.finding.result}")
    print(f"report: {folder / 'report.md'}; to send: {sent}")
    return EXIT_FAILED if any(result.finding.verdict == FAILED for result in results) else 0


def chosen_steps(text: str | None) -> list[str]:
    """Names of steps, in the order in which they run.

    Raises:
        UserError: for one that there is not.
    """
    names = text.split(",") if text else [*STEPS]
    for name in names:
        if name not in STEPS:
            raise unknown_choice("--steps", name, STEPS)
    return [name for name in STEPS if name in names]


def prepare(folder: Path, device: str, num_devices: int | None, everything: bool) -> Check:
    """See what the machine has.

    Raises:
        UserError: if it has less than what is asked for, or the folder is none of the check's.
    """
    claim(folder)
    machine = look(folder, device)
    if device == "cuda" and not machine.gpus:
        raise UserError("--device=cuda: torch sees no GPU here")
    kind = "cuda" if machine.gpus else "cpu"
    setup = Setup.of(kind, len(machine.gpus), num_devices, everything, folder, origin_of(machine))
    return Check(machine, setup, config_tree().resolve().parent / "tests", partial(print, flush=True))


def look(folder: Path, device: str) -> Machine:
    """What a process of its own finds on this machine.

    Raises:
        UserError: if it finds nothing out.
    """
    place, log = folder / "machine.json", folder / "machine.log"
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    log.unlink(missing_ok=True)
    wrong = run_python(["-m", "entrain_bench.lab.gpu_check.machine", str(place)], log, MACHINE_S, hidden)
    if wrong:
        raise UserError(f"--device={device}: what there is cannot be found out: {wrong} ({last_line(log)})")
    return read_machine(place)


def run_steps(
    check: Check,
    names: Sequence[str],
    *,
    again: bool = False,
    steps: dict[str, Callable[[Check], Finding]] = STEPS,
) -> list[StepResult]:
    """Run steps that have not passed or been skipped before; whatever goes wrong in one, the next is run.

    Args:
        check: what they look at.
        names: of the steps.
        again: run them even so.
        steps: by name.

    Returns:
        Their results, which the folder holds together with those of other steps, and the report of all.
    """
    folder, results = check.setup.folder, list[StepResult]()
    identity = identity_of(check.setup, [*check.gpu_tests, *(check.tests / "support").rglob("*.py")])
    for number, name in enumerate(names, start=1):
        place = folder / "steps" / f"{name}.json"
        known = StepResult.read(place)
        if known and known.identity == identity and known.finding.verdict != FAILED and not again:
            check.say(f"[{number}/{len(names)}] {name}: {known.finding.verdict} earlier")
            results.append(known)
            continue
        if again:
            forget(check, name)
        check.say(f"[{number}/{len(names)}] {name}")
        result = StepResult(name, identity, *_timed(steps[name], check))
        result.write(place)
        results.append(result)
        verdict = f"{result.finding.verdict} ({result.seconds:.0f} s): {result.finding.result}"
        check.say(f"[{number}/{len(names)}] {name}: {verdict}")
        write_report(check, identity)
    write_report(check, identity)
    return results


def forget(check: Check, name: str) -> None:
    """Remove what the runs of a step have left, so that none of them is taken for finished."""
    for runs in check.setup.runs.glob(f"{name}_*"):
        shutil.rmtree(runs)
    if name == "profile":
        check.setup.profile.unlink(missing_ok=True)


def _timed(step: Callable[[Check], Finding], check: Check) -> tuple[Finding, float]:
    started = perf_counter()
    try:
        finding = step(check)
    except Exception as error:
        finding = Finding(FAILED, explain(error) if not isinstance(error, UserError) else str(error))
    return finding, perf_counter() - started


def write_report(check: Check, identity: str) -> None:
    """Write report.md and numbers.json of all steps that the folder has results of: of these devices and this code."""
    folder, scrubber = check.setup.folder, Scrubber.of_this_machine()
    found = [StepResult.read(folder / "steps" / f"{name}.json") for name in STEPS]
    done = [result for result in found if result and result.identity == identity]
    missing = sorted({*STEPS} - {result.name for result in done}, key=[*STEPS].index)
    date = datetime.now(UTC).date().isoformat()
    count, machine = check.setup.num_devices, check.machine
    device = f"x {machine.gpus[0]['name']}" if check.setup.on_gpu else f"ranks on {machine.system['processor']}"
    title = f"Check of {count} {device}, {date}"
    texts = {
        "report.md": page(title, COMMAND, done, missing),
        "numbers.json": json.dumps([asdict(result) for result in done], indent=1),
    }
    for name, text in texts.items():
        write_atomically(folder / name, scrubber.text(text).encode())


if __name__ == "__main__":
    # An exception, so that the process that runs at the moment is ended, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
