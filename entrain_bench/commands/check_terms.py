"""``entrain-bench check-terms [KEY=VALUE ...]``: random options and other terms, and write ``terms.md``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from entrain_bench.base.files import write_atomically
from entrain_bench.commands.publish import write_tables
from entrain_bench.commands.watch import Watch, say
from entrain_bench.config.grammar import Folder, Request, Verb, own
from entrain_bench.lab.terms import check_terms, read_terms
from entrain_bench.lab.terms_page import terms_answer, terms_markdown
from entrain_bench.records.records import Results
from entrain_bench.run.cells import Done
from entrain_bench.run.parallel import num_processes
from entrain_bench.run.study import Study


@dataclass(frozen=True, slots=True)
class Keys(Folder):
    """Own keys."""

    terms: str | None = own(None, "YAML of jobs and tries; null: experiments/terms.yaml")


VERB = Verb(Keys, examples=["results_dir=results"])


def main(request: Request[Keys]) -> int:
    """Run all tries that have no record, and write ``terms.md``; finished runs are skipped."""
    keys = request.keys
    results = Results(Path(keys.results_dir))
    results.prepare()
    study = Study(results, request.config_dir)
    terms = read_terms(Path(keys.terms) if keys.terms else None)
    watch = Watch(0)

    def count(done: Done) -> None:
        watch.total = max(watch.total, watch.run + watch.finished + 1)
        watch(done)

    try:
        outcome = check_terms(terms, study, num_processes(), count)
    finally:
        study.composer.save()
        write_tables(results)
    path = results.root / "terms.md"
    write_atomically(path, terms_markdown(terms, outcome).encode())
    say(f"{terms_answer(terms, outcome)} {path}")
    return 0
