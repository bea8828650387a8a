"""Makes small mistakes in the core, one at a time, and counts how many the tests notice.

A mistake is an operator, a condition or a number changed, by cosmic-ray's operators. Prints the mutants that survived.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

import yaml
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from mutants.running import Coverage, copy_repository, list_records, passes

ROOT = Path(__file__).parents[2]
ROOMS = ("specs", "program", "costs", "simulate", "balancing")
# Whole runs against committed results, and the configuration's defaults.
WHOLE_RUNS = ("tests/test_defaults.py", "tests/test_reference_cells.py")
LEAST_KILLED = 0.9
ARITHMETIC = "(Add|Sub|Mul|Div|FloorDiv|Mod|Pow)"
BITS = "(BitOr|BitAnd|BitXor)"
ORDER = "(Eq|NotEq|Lt|LtE|Gt|GtE)"
# cosmic-ray's other operators mostly end in an exception at once, or change nothing.
OPERATORS = re.compile(
    "core/(AddNot|NumberReplacer|ZeroIterationForLoop|Replace(And|Or|Break|Continue|True|False)With.*"
    f"|Replace(Binary|Comparison)Operator_({ARITHMETIC}_{ARITHMETIC}|{BITS}_{BITS}|{ORDER}_{ORDER}|In_NotIn|NotIn_In"
    "|Is_IsNot|IsNot_Is)|ReplaceUnaryOperator_Delete_.*)"
)


@dataclass(frozen=True, slots=True, order=True)
class Mutant:
    """One file of the core with one mistake in it: its path, the line before and after, and the whole text."""

    path: str
    line: int
    before: str
    after: str
    text: str


def main() -> int:
    """Try a sample of mutants; 1 if the tests notice too few, or a survivor is not explained."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="how many mutants (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="which ones are drawn (default: 0)")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the mutants to try (default: all)")
    options = parser.parse_args()
    entries = yaml.safe_load(Path(__file__).with_name("equivalent.yaml").read_text())
    reasons = {(entry["path"], entry["before"], entry["after"]): entry["why"] for entry in entries}
    mutants = dict(enumerate(draw_mutants(options.seed, options.count), start=1))
    tried = {number: mutants[number] for number in options.only or mutants}
    num_workers = os.cpu_count() or 1
    survivors = []
    with TemporaryDirectory() as folder, ThreadPoolExecutor(num_workers) as workers:
        suite = Suite(Path(folder), num_workers)
        records = list_records(ROOT, test_files(), ROOT / "build" / "mutants")
        new = {file: record for file, record in records.items() if not record.exists()}
        print(f"{len(new)} of {len(records)} files of tests are executed to see what they cover", flush=True)
        deque(workers.map(suite.record, new, new.values()))
        coverage = Coverage(records.values())
        outcomes = workers.map(lambda mutant: suite.kills(mutant, coverage), tried.values())
        for (number, mutant), killed in zip(tried.items(), outcomes, strict=True):
            why = reasons.get((mutant.path, mutant.before, mutant.after), "not explained")
            print(
                f"{number}/{len(mutants)} {'killed' if killed else 'survived'}: {mutant.path}:{mutant.line}", flush=True
            )
            if not killed:
                survivors.append(why)
                print(f"-{mutant.before}\n+{mutant.after}\n{why}", flush=True)
    num_killed = len(tried) - len(survivors)
    print(f"{num_killed} of {len(tried)} mutants killed ({num_killed / len(tried):.0%})")
    return int(num_killed < LEAST_KILLED * len(tried) or "not explained" in survivors)


def test_files() -> list[str]:
    """Files with tests of the core."""
    folders = [ROOT / "tests" / room for room in (*ROOMS, "strategies")]
    files = sorted(path for folder in folders for path in folder.rglob("test_*.py"))
    return [*(str(path.relative_to(ROOT)) for path in files), *WHOLE_RUNS]


def draw_mutants(seed: int, count: int) -> list[Mutant]:
    """Mutants of the core at ``count`` places; a place's rank is a hash, so edits elsewhere keep it in the sample."""
    folders = [*(ROOT / "entrain_bench" / room for room in ROOMS), ROOT / "strategies"]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    places = (place for file in files for place in mistakes_in(file.read_text(), str(file.relative_to(ROOT)), seed))
    mutants: dict[tuple[str, int], Mutant] = {}
    for _, path, line, operator, occurrence in sorted(places):
        if (path, line) not in mutants and (mutant := make_mutant(path, operator, occurrence)):
            mutants[path, line] = mutant
        if len(mutants) == count:
            break
    return [*mutants.values()]


def mistakes_in(source: str, path: str, seed: int) -> Iterator[tuple[str, str, int, str, int]]:
    """Rank, path, line, operator and its occurrence of each mistake that can be made in a file."""
    lines = source.splitlines()
    nodes = [*ast_nodes(get_ast(source))]
    for name in filter(OPERATORS.fullmatch, operator_names()):
        operator = get_operator(name)()
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, ((line, column), _) in enumerate(positions):
            place = repr((seed, path, lines[line - 1].strip(), column, name))
            yield sha256(place.encode()).hexdigest(), path, line, name, occurrence


def make_mutant(path: str, operator: str, occurrence: int, source: str | None = None) -> Mutant | None:
    """The mutant, or None if it is no Python or its decisions are the same."""
    source = (ROOT / path).read_text() if source is None else source
    text = mutate_code(source, get_operator(operator)(), occurrence)
    try:
        if _decisions(text) == _decisions(source):
            return None
    except SyntaxError:
        return None
    pairs = enumerate(zip(source.splitlines(), text.splitlines(), strict=False), start=1)
    line, (before, after) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    return Mutant(path, line, before.strip(), after.strip(), text)


class Suite:
    """The tests, on copies of the repository: one for each worker."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        self.loops = folder / "loops"
        self.copies = SimpleQueue[Path]()
        for worker in range(num_workers):
            self.copies.put(copy_repository(ROOT, folder / str(worker)))

    def record(self, file: str, record: Path) -> None:
        """Note what the tests of a file execute."""
        copy = self.copies.get()
        passes(copy, self.loops, {file: 0.0}, record)
        self.copies.put(copy)

    def kills(self, mutant: Mutant, coverage: Coverage) -> bool:
        """Whether a test fails on a mutant, or does not end."""
        room, name = mutant.path.removeprefix("entrain_bench/").removesuffix(".py").split("/")[:2]
        copy = self.copies.get()
        file = copy / mutant.path
        mirror = (f"tests/{room}/{name}/", f"tests/{room}/test_{name}.py")
        tests = coverage.choose(mutant.path, mutant.line, mirror, WHOLE_RUNS)
        original = file.rename(copy / "original")
        file.write_text(mutant.text)
        with TemporaryDirectory() as folder:
            # A line of a function that Python executes is in no compiled loop.
            keeps_loops = (mutant.path, mutant.line) in coverage.lines
            killed = not passes(copy, self.loops if keeps_loops else Path(folder), tests)
        original.replace(file)
        self.copies.put(copy)
        return killed


def _decisions(source: str) -> str:
    """A syntax tree without what decides nothing: annotations, decorators, checks of invariants, texts of messages."""
    return ast.dump(_Decisions().visit(ast.parse(source)))


class _Decisions(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> ast.AST:
        for field in ("annotation", "returns", "decorator_list", "exc"):
            if hasattr(node, field):
                setattr(node, field, None)
        if isinstance(node, ast.Call):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
        nothing = isinstance(node, ast.Assert | ast.JoinedStr)
        return ast.Pass() if nothing else self.generic_visit(node)


if __name__ == "__main__":
    sys.exit(main())
