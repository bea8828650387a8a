"""``entrain-bench ls GROUP``: models, clusters, workloads or strategies that a run may name; supported combinations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

from entrain_bench.answers.console_table import print_texts, print_words
from entrain_bench.answers.labels import cost_source, strategy_facts
from entrain_bench.answers.support import support_tables, with_notes
from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.commands.watch import say
from entrain_bench.config.comments import groups
from entrain_bench.config.compose import Composer
from entrain_bench.config.grammar import NoKeys, Request, Verb
from entrain_bench.config.hub.files import HUB, bundled_models

type Rows = list[list[str]]


def _choices(group: str, config_dir: str | None) -> Mapping[str, str]:
    return groups(config_dir)[group]


def _texts(group: str) -> Callable[[str | None], tuple[list[str], Rows]]:
    return lambda config_dir: ([group, "description"], [[*row] for row in _choices(group, config_dir).items()])


def _models(config_dir: str | None) -> tuple[list[str], Rows]:
    hub = [[f"{HUB}{one.name}", f"Without a network: {one.source}, {one.read}."] for one in bundled_models().values()]
    return ["model", "description"], [*([*row] for row in _choices("model", config_dir).items()), *hub]


def _clusters(config_dir: str | None) -> tuple[list[str], Rows]:
    composer = Composer(config_dir)
    rows = list[list[str]]()
    for name, text in _choices("cluster", config_dir).items():
        values = composer.run((f"cluster={name}",)).cluster
        gpus = int(values["num_nodes"]) * int(values["gpus_per_node"])
        rows.append([name, str(gpus), str(values["device"]["name"]), cost_source(values), text])
    return ["cluster", "GPUs", "device", "constants", "description"], rows


def _strategies(config_dir: str | None) -> tuple[list[str], Rows]:
    families = {facts.name: facts.family for facts in sorted(strategy_facts(), key=attrgetter("order"))}
    texts = _choices("strategy", config_dir)
    names = [*families, *(name for name in texts if name not in families)]
    return ["strategy", "family", "idea"], [[name, families.get(name, "yours"), texts[name]] for name in names]


TABLES: Mapping[str, Callable[[str | None], tuple[list[str], Rows]]] = {
    "models": _models,
    "clusters": _clusters,
    "workloads": _texts("workload"),
    "strategies": _strategies,
}
SUPPORT = "support"
NAMES = (*TABLES, SUPPORT)
VERB = Verb(NoKeys, words=f"one of {', '.join(NAMES)}", examples=["models", "clusters"])


def main(request: Request[NoKeys]) -> int:
    """Print the table of one group; ``UserError`` without a group, and for an unknown one."""
    if len(request.words) != 1:
        raise UserError(f"ls: takes one word; choices: {', '.join(NAMES)}")
    (name,) = request.words
    if name not in NAMES:
        raise unknown_choice("ls", name, NAMES)
    if name == SUPPORT:
        return _support()
    headings, rows = TABLES[name](request.config_dir)
    print_texts(headings, rows, left=len(headings))
    return 0


def _support() -> int:
    say("Trying every strategy with every feature: about a minute")
    for title, make, note in support_tables():
        headings, rows = make()
        numbered, reasons = with_notes(rows)
        print_texts(headings, numbered, title, left=len(headings))
        for line in filter(None, [*(f"({number}) {text}" for number, text in enumerate(reasons, start=1)), note]):
            print_words(line)
        print()
    return 0
