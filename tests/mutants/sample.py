"""A fixed sample of the small mistakes that could be made in the core: an operator, a condition or a number changed."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

SEED = 0
ROOMS = ("specs", "program", "costs", "simulate", "balancing")
FILES = ("base/arrays.py", "base/arithmetic.py", "records/metrics.py")
# Others mostly end in an exception at once, or change nothing (== for is, an assertion's decorator).
ARITHMETIC = {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"}
BITS = {"BitOr", "BitAnd", "BitXor"}
ORDERS = {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"}
PLAIN = {
    "AddNot",
    "NumberReplacer",
    "ReplaceAndWithOr",
    "ReplaceBreakWithContinue",
    "ReplaceComparisonOperator_In_NotIn",
    "ReplaceComparisonOperator_Is_IsNot",
    "ReplaceComparisonOperator_IsNot_Is",
    "ReplaceComparisonOperator_NotIn_In",
    "ReplaceContinueWithBreak",
    "ReplaceFalseWithTrue",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceUnaryOperator_Delete_Invert",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_Delete_USub",
    "ZeroIterationForLoop",
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One file of the core with one mistake in it: where, the line before and after, and the whole text."""

    path: str
    line: int
    before: str
    after: str
    text: str


def core_files(root: Path) -> list[Path]:
    """Sources that are mutated, in a fixed order."""
    suite = root / "entrain_bench"
    folders = [*(suite / room for room in ROOMS), root / "strategies"]
    return sorted([*(suite / name for name in FILES), *(path for each in folders for path in each.rglob("*.py"))])


def sample_mutants(root: Path, count: int) -> list[Mutant]:
    """Mutants at ``count`` places; what is edited elsewhere leaves a place in the sample, for its rank is a hash."""
    ranked = sorted(place for path in core_files(root) for place in _places(path.read_text(), _name(root, path)))
    found: list[Mutant] = []
    for _, path, mistakes in ranked:
        source = (root / path).read_text()
        found += islice((mutant for mistake in mistakes for mutant in _mutants(path, source, *mistake[1:])), 1)
        if len(found) == count:
            break
    return found


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _places(source: str, path: str) -> Iterator[tuple[str, str, list[tuple[str, str, int]]]]:
    """Rank of each place of a file, its path, and what may happen there: rank, operator, occurrence in the file."""
    lines, nodes = source.splitlines(), list(ast_nodes(get_ast(source)))
    mistakes = defaultdict(list)
    for name in filter(_is_useful, operator_names()):
        positions = chain.from_iterable(map(get_operator(name)().mutation_positions, nodes))
        for occurrence, (start, _) in enumerate(positions):
            mistakes[start].append((name, occurrence))
    seen = Counter[tuple[str, int]]()
    for (line, column), possible in sorted(mistakes.items()):
        place = lines[line - 1].strip(), column
        seen[place] += 1
        rank = _hash(path, *place, seen[place])
        yield rank, path, sorted((_hash(rank, index), *each) for index, each in enumerate(sorted(possible)))


def _is_useful(operator: str) -> bool:
    plain = operator.partition("/")[2]
    _, *terms = plain.split("_")
    return plain in PLAIN or any(len(terms) == 2 and group.issuperset(terms) for group in (ARITHMETIC, BITS, ORDERS))


def _hash(*parts: object) -> str:
    return sha256(repr((SEED, *parts)).encode()).hexdigest()


def _mutants(path: str, source: str, operator: str, occurrence: int) -> Iterator[Mutant]:
    """The mutant, unless it is no Python or says the same."""
    text = mutate_code(source, get_operator(operator)(), occurrence)
    try:
        same = _meaning(text) == _meaning(source)
    except SyntaxError:
        return
    if not same:
        pairs = enumerate(zip(source.splitlines(), text.splitlines(), strict=False), start=1)
        line, (before, after) = next(each for each in pairs if each[1][0] != each[1][1])
        yield Mutant(path, line, before.strip(), after.strip(), text)


def _meaning(source: str) -> str:
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
