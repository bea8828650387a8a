"""What counts as a mistake, on a few lines of code."""

from __future__ import annotations

from mutants.__main__ import make_mutant, mistakes_in

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
    mistakes = [mistake[3:] for mistake in mistakes_in(SOURCE, "share.py", 0)]
    mutants = [make_mutant("share.py", *mistake, SOURCE) for mistake in mistakes]
    changed = {(mutant.line, mutant.after) for mutant in mutants if mutant}
    assert {line for line, _ in changed} == {2, 5, 7}
    assert {after for line, after in changed if line == 5} == {"if not total is None:", "if total is not None:"}
    operators = ["+", "*", "/", "//", "%", "**"]
    assert {after for line, after in changed if line == 7} == {
        f'return dict(zip("a", [total {operator} parts], strict=True))' for operator in operators
    }
