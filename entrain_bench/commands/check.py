"""``entrain-bench check strategy=NAME [KEY=VALUE ...]``: run the conformance tests on one strategy."""

from operator import attrgetter

from rich.console import Console

from entrain_bench.answers.commands import command_line
from entrain_bench.answers.console_table import print_texts
from entrain_bench.answers.text import count
from entrain_bench.base.errors import TRACEBACK_VARIABLE, UserError
from entrain_bench.commands.watch import say
from entrain_bench.config.compose import Composer
from entrain_bench.config.grammar import RUN_KEYS, NoKeys, Request, Verb
from entrain_bench.conformance.suite import PARTNER, VALID, Verdict, cases, examine

EXIT_FAILED = 1
VERB = Verb(NoKeys, RUN_KEYS, examples=["--config-dir my_folder strategy=mine"])


def main(request: Request[NoKeys]) -> int:
    """Check a strategy; returns 0, or 1 if a check failed or no run was possible; ``UserError`` if it has no config."""
    if not request.overrides:
        raise UserError("strategy: must be given: entrain-bench check strategy=NAME")
    composer = Composer(request.config_dir)
    checks = cases(composer, request.overrides)
    composer.save()
    verdicts = []
    for number, verdict in enumerate(examine(checks), start=1):
        verdicts.append(verdict)
        say(f"[{number}/{len(checks)}] {verdict.case.check}: {verdict.case.name}: {verdict.outcome}")
    # A row for every check, then all that failed or were skipped, and why, each reason once.
    table = list[list[str]]()
    for check in dict.fromkeys(verdict.case.check for verdict in verdicts):
        rows = [verdict for verdict in verdicts if verdict.case.check == check]
        counts = [sum(row.outcome == outcome for row in rows) for outcome in ("ok", "skipped", "failed")]
        seconds = sum(row.seconds for row in rows)
        table.append([check, *(str(count or "") for count in counts), f"{seconds:.1f}"])
    print_texts(["check", "ok", "skipped", "failed", "seconds"], table)
    console = Console(soft_wrap=True)
    alike = dict[str, list[Verdict]]()
    for verdict in filter(attrgetter("detail"), verdicts):
        alike.setdefault(verdict.cause, []).append(verdict)
    for first, *others in alike.values():
        more = f" (and in {count(len(others), 'more test')})" if others else ""
        line = f"{first.outcome}: {first.case.check}: {first.case.name}: {first.detail}{more}"
        console.print(line, markup=False, highlight=False)
    num_failed = sum(verdict.outcome == "failed" for verdict in verdicts)
    runs = any(verdict.outcome == "ok" for verdict in verdicts if verdict.case.check == VALID)
    passed = runs and not num_failed
    console.print(f"\n{_verdict(num_failed, runs, len(verdicts))}", markup=False, highlight=False)
    name = next((text for text in request.overrides if text.startswith("strategy=")), "strategy=NAME")
    compared = f"strategy={PARTNER},{name.partition('=')[2]}"
    following = ["--multirun", compared, "workload=chartqa", "seed=0,1,2"] if passed else ["check", *request.overrides]
    console.print(f"next: {command_line(following, request.config_dir)}", markup=False, highlight=False)
    return 0 if passed else EXIT_FAILED


def _verdict(num_failed: int, runs: bool, num_tests: int) -> str:
    if num_failed:
        where = f"{TRACEBACK_VARIABLE}=1 shows where an error comes from"
        return f"not passed: {num_failed} of {num_tests} tests failed. Repair the first and check again; {where}"
    if not runs:
        return "not passed: the strategy supports none of the runs"
    return f"passed: no rule is broken in {count(num_tests, 'test')}, so the strategy can be compared"
