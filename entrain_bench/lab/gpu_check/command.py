"""Check whether training works on this machine's GPUs, how fast it is, and how accurate predictions are.

The sections run one after the other and leave one folder: report.md, numbers.json and logs. A second call resumes:
runs of the same devices, options and code that finished are not repeated. Without a GPU ranks over gloo are checked.
"""

from __future__ import annotations

import hashlib
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from entrain_bench.answers.text import markdown_table
from entrain_bench.base.errors import UserError, explain, require, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.lab.gpu_check.sections import FAILED, NUM_DEVICES, SECTIONS, Check, Finding, Rows, Section, say
from entrain_bench.lab.measuring import Machine, last_line, read_json, run_python, write_json
from entrain_bench.records.code import hash_of, sources_of
from entrain_bench.train.settings import DEVICES

COMMAND = "make gpu-check"
MACHINE_S = 300.0
# Ranks over gloo where there is no GPU.
CPU_RANKS = 2
# In every folder that a check has made.
MARK = ".gpu-check"
# A profile depends on this module and on its imports.
PROFILING = frozenset({"entrain_bench.train.profiling.recorder"})
# Columns for programs that read numbers.json.
HIDDEN = frozenset({"repetitions_s", "num_ranks", "seed", "chance", "sign_error"})
FORMATS = {"last_loss": ".6f", "largest_difference": ".1e", "error": "+.1%", "iteration_error": "+.1%", "MFU": ".1%"}


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the check."""
    parser.add_argument("--output", type=Path, help="folder of the report (default: results/gpu-check-<date>)")
    parser.add_argument("--device", default="auto", choices=DEVICES, help="auto: GPUs if there are any")
    parser.add_argument("--devices", type=int, help="1, 2, 4 or 8 (default: all GPUs, or 2 ranks on a CPU)")
    parser.add_argument("--sections", help=f"some of {','.join(SECTIONS)} (default: all)")
    parser.add_argument("--all", action="store_true", help="check all strategies and workloads (default: a part)")


def run(options: Namespace) -> int:
    """Run the sections; return 1 if one failed. ``UserError`` for bad options."""
    names = chosen_sections(options.sections)
    folder = options.output or options.results_dir / f"gpu-check-{datetime.now(UTC).date().isoformat()}"
    claim(folder)
    machine = look(folder, options.device)
    if options.device == "cuda" and not machine.gpus:
        raise UserError("--device=cuda: torch sees no GPU here")
    check = make_check(machine, options.devices, options.all, folder, origin_of(machine))
    results = run_sections(check, names)
    for result in results:
        print(f"{result.name:12} {result.finding.verdict:8} {result.finding.result}")
    print(f"report: {folder / 'report.md'}")
    return 1 if any(result.finding.verdict == FAILED for result in results) else 0


def chosen_sections(text: str | None) -> list[str]:
    """Names of sections in the order in which they run; ``UserError`` for an unknown one."""
    names = text.split(",") if text else [*SECTIONS]
    if unknown := [name for name in names if name not in SECTIONS]:
        raise unknown_choice("--sections", unknown[0], SECTIONS)
    return [name for name in SECTIONS if name in names]


def claim(folder: Path) -> None:
    """Make the folder of a check, or resume the check that made it; ``UserError`` if it cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = (folder / MARK).exists() or not any(folder.iterdir())
        require(fresh, "--output", folder, "a new or empty folder, or the folder of an earlier check")
        (folder / MARK).touch()
    except OSError as error:
        raise UserError(f"--output={folder}: cannot be written to ({error.strerror})") from error


def look(folder: Path, device: str) -> Machine:
    """Return what a process of its own finds on this machine; ``UserError`` if that process fails."""
    place = folder / "machine.json"
    log = folder / "machine.log"
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    log.unlink(missing_ok=True)
    if wrong := run_python(["-m", "entrain_bench.lab.measuring", str(place)], log, MACHINE_S, hidden):
        raise UserError(f"--device={device}: device detection failed: {wrong} ({last_line(log)}). See {log}.")
    return Machine(**read_json(place))


def make_check(machine: Machine, num_devices: int | None, everything: bool, folder: Path, origin: str) -> Check:
    """The check of a machine; ``UserError`` where devices are missing, or no layout fits.

    Without ``num_devices`` as many as layouts are made for are used.
    """
    kind = "cuda" if machine.gpus else "cpu"
    present = len(machine.gpus)
    if num_devices is None:
        num_devices = max(n for n in NUM_DEVICES if n <= present) if kind == "cuda" else CPU_RANKS
    require(num_devices in NUM_DEVICES, "--devices", num_devices, "1, 2, 4 or 8")
    require(kind == "cpu" or num_devices <= present, "--devices", num_devices, f"at most the {present} GPUs here")
    return Check(machine, kind, num_devices, everything, folder, origin)


def origin_of(machine: Machine) -> str:
    """Hash of what a measurement depends on: the machine, its packages and variables, and the code that measures."""
    # Load and kernel release are not part of it.
    fixed = {name: value for name, value in machine.host.items() if name not in ("load average", "system")}
    found = [machine.gpus, fixed, machine.variables, machine.nvidia_smi, hash_of(sources_of(PROFILING))]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class SectionResult:
    """A section that came to an end, on the devices and with the options of ``identity``."""

    name: str
    identity: str
    finding: Finding
    seconds: float


def read_result(path: Path) -> SectionResult | None:
    """Return the result that a file holds, or None if there is none, or half of one."""
    try:
        values = read_json(path)
        return SectionResult(**values | {"finding": Finding(**values["finding"])})
    except (KeyError, TypeError):
        return None


def run_sections(check: Check, names: Sequence[str], sections: Mapping[str, Section] = SECTIONS) -> list[SectionResult]:
    """Run sections; an error in one does not stop the next.

    The folder keeps their results, with those of other sections, and the report of all.
    """
    results = list[SectionResult]()
    for number, name in enumerate(names, start=1):
        counted = f"[{number}/{len(names)}] {name}"
        say(counted)
        started = perf_counter()
        try:
            finding = sections[name].run(check)
        except Exception as error:
            finding = Finding(FAILED, explain(error) if not isinstance(error, UserError) else str(error))
        result = SectionResult(name, check.identity, finding, perf_counter() - started)
        write_json(check.folder / "sections" / f"{name}.json", asdict(result))
        results.append(result)
        say(f"{counted}: {finding.verdict} ({result.seconds:.0f} s): {finding.result}")
        write_report(check)
    return results


def write_report(check: Check) -> None:
    """Write report.md and numbers.json of all results in the folder that are of these devices and options."""
    folder = check.folder
    machine = check.machine
    found = [read_result(folder / "sections" / f"{name}.json") for name in SECTIONS]
    done = [result for result in found if result and result.identity == check.identity]
    device = f"x {machine.gpus[0]['name']}" if check.on_gpu else f"ranks on {machine.host['processor']}"
    title = f"Check of {check.num_devices} {device}, {datetime.now(UTC).date().isoformat()}"
    write_atomically(folder / "report.md", page(title, COMMAND, done, SECTIONS).encode())
    write_json(folder / "numbers.json", [asdict(result) for result in done])


def page(title: str, command: str, results: Sequence[SectionResult], sections: Mapping[str, Section]) -> str:
    """Return the report: a title, what made it, and results in order; sections without one are listed as not run."""
    parts = [f"# {title}\n"]
    rows = [
        [r.name, sections[r.name].question, r.finding.verdict, r.finding.result, f"{r.seconds:.0f}"] for r in results
    ]
    done = {result.name for result in results}
    rows += [[name, each.question, "not run", "", ""] for name, each in sections.items() if name not in done]
    parts.append(markdown_table(["section", "question", "verdict", "result", "seconds"], rows, right=["seconds"]))
    parts.append(f"Made by `{command}`. All numbers: `numbers.json`; output of every process: `*.log`, `runs/`.")
    for result in results:
        finding = result.finding
        parts += [f"\n## {result.name}: {finding.verdict}\n", finding.result]
        if note := sections[result.name].note:
            parts.append(f"\n{note}")
        for heading, table in finding.tables.items():
            if table:
                parts += [f"\n**{heading}**\n" if heading else "", _table(table)]
        parts += [f"\n`{heading}`\n\n```\n{text}\n```" for heading, text in finding.text.items() if text]
    return "\n".join(parts) + "\n"


def _table(rows: Rows) -> str:
    def cell(column: str, value: Any) -> str:
        if value is None:
            return ""
        return f"{value:{FORMATS.get(column, '.4g')}}" if isinstance(value, float) else str(value)

    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in HIDDEN]
    numbers = [name for name in columns if any(isinstance(row.get(name), float | int) for row in rows)]
    return markdown_table(columns, [[cell(name, row.get(name)) for name in columns] for row in rows], right=numbers)
