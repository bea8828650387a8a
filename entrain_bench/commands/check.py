"""``entrain-bench check strategy=NAME [KEY=VALUE ...]``: run the conformance tests on one strategy."""

from rich.console import Console
from rich.table import Table

from entrain_bench.base.errors import UserError
from entrain_bench.commands.watch import say
from entrain_bench.config.compose import Composer
from entrain_bench.config.grammar import RUN_KEYS, NoKeys, Request, Verb
from entrain_bench.conformance.suite import VALID, cases, examine

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
    # A row for every check, then whatever failed or was skipped, and why.
    table = Table("check", "ok", "skipped", "failed", "seconds")
    for check in dict.fromkeys(verdict.case.check for verdict in verdicts):
        rows = [verdict for verdict in verdicts if verdict.case.check == check]
        counts = [sum(row.outcome == outcome for row in rows) for outcome in ("ok", "skipped", "failed")]
        table.add_row(check, *(str(count or "") for count in counts), f"{sum(row.seconds for row in rows):.1f}")
    console = Console(soft_wrap=True)
    console.print(table)
    for verdict in verdicts:
        if verdict.detail:
            line = f"{verdict.outcome}: {verdict.case.check}: {verdict.case.name}: {verdict.detail}"
            console.print(line, markup=False, highlight=False)
    failed = any(verdict.outcome == "failed" for verdict in verdicts)
    runs = any(verdict.outcome == "ok" for verdict in verdicts if verdict.case.check == VALID)
    return 0 if runs and not failed else EXIT_FAILED
