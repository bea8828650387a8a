"""The check of words finds long sentences and unclear words, and leaves out what nobody wrote by hand."""

from __future__ import annotations

import pytest
from words import MAX_WORDS, PENDING, ROOT, problems


@pytest.mark.parametrize(
    "text",
    [
        "word " * (MAX_WORDS + 1),
        f"- {'word ' * (MAX_WORDS + 1)}",
        f"| short | {'word ' * (MAX_WORDS + 1)} |",
        "They run\nanew.",
        "The stage as it\nis.",
        "Every colour differs.",
        "Two [links](a.md) beside each other.",
    ],
)
def test_a_problem_is_found(text: str) -> None:
    assert len(list(problems(f"# Title\n\n{text}\n"))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "word " * MAX_WORDS,
        f"{'word ' * (MAX_WORDS - 1)}word. {'word ' * MAX_WORDS}",
        f"{'word ' * MAX_WORDS}\n\n{'word ' * MAX_WORDS}",
        f"- {'word ' * 20}\n- {'word ' * 20}",
        "```\nanew\n```",
        "    anew",
        "`anew` [link](beside.md)",
        "<!-- table: x -->\n\n| anew |\n\n<!-- end -->",
    ],
)
def test_other_texts_have_none(text: str) -> None:
    assert not list(problems(text))


def test_pages_that_are_left_out_exist() -> None:
    assert all((ROOT / name).exists() for name in PENDING)
