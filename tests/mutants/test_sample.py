"""What counts as a mistake, on a few lines of code."""

from __future__ import annotations

from mutants.sample import _mutants, _places

SOURCE = '''\
@cache
def share(total: int | None, parts: int = 2) -> dict[str, int]:
    """Not 1 word of this."""
    assert parts > 0
    if total is None:
        raise ValueError(f"total={total}: must be less than {parts - 1}")
    return dict(zip("a", [total - parts], strict=True))
'''


def test_mistakes_are_made_where_something_is_decided() -> None:
    found = {
        (mutant.line, mutant.after)
        for _, path, mistakes in _places(SOURCE, "share.py")
        for _, operator, occurrence in mistakes
        for mutant in _mutants(path, SOURCE, operator, occurrence)
    }
    assert {line for line, _ in found} == {2, 5, 7}
    assert {after for line, after in found if line == 5} == {"if not total is None:", "if total is not None:"}
    operators = ["+", "*", "/", "//", "%", "**"]
    assert {after for line, after in found if line == 7} == {
        f'return dict(zip("a", [total {operator} parts], strict=True))' for operator in operators
    }


def test_a_place_keeps_its_rank_when_lines_are_added_elsewhere() -> None:
    ranks = [{rank for rank, *_ in _places(source, "share.py")} for source in (SOURCE, f"import cache\n\n{SOURCE}")]
    assert ranks[0] == ranks[1]
