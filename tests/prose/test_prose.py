"""The check of words: what counts as a sentence, and what is found in it."""

import pytest

from prose import __main__ as prose
from prose.__main__ import MAX_WORDS, described, leaves, problems, python_texts, sentences

LONG = "word " * (MAX_WORDS + 1)


def test_code_and_addresses_are_no_prose_and_items_and_cells_are_texts() -> None:
    text = "# Head\n\nOne `a b` [two](three four). Second\nline.\n\n    anew\n\n```sh\nanew\n```\n<!-- alike -->\n"
    assert [*sentences(text)] == ["Head", "One code two.", "Second line."]
    assert [*sentences("- one\n- two\n  more\n\n| a | b c |\n|---|---|\n")][:4] == ["- one", "- two more", "a", "b c"]
    assert problems(text) == []


@pytest.mark.parametrize("text", [LONG, "Draw it anew.", "Nobody waits.", "This stands for it.", "Run it as it is."])
def test_long_sentences_and_their_words_are_found(text: str) -> None:
    assert len(problems(f"Fine.\n\n{text}\n\nBesides, renewal goes well.")) == 1


def test_texts_of_yaml_and_help_are_read_without_keys() -> None:
    assert [*leaves({"why": ["It is anew.", "seed=range(2) a"]})] == ["It is anew."]
    screen = "entrain-bench x\n\n  --all, -a     run everything\n                again\n  name=anew     other\n"
    assert [*sentences(described(screen))] == ["entrain-bench x", "run everything again", "other"]


CODE = '''"""What is read.

Attributes:
    a: what it is.
"""
f"{what} takes so many s"  # Nobody
# So
# many.
x = "anew"
'''


def test_docstrings_comments_and_messages_are_read_with_their_lines() -> None:
    found = [(line, word.split("'")[1]) for line, text in python_texts(CODE) for word in problems(text, "a.py:1")]
    assert sorted(found) == [(1, "What"), (1, "what"), (6, "Nobody"), (6, "so many"), (7, "So many")]


@pytest.mark.parametrize(
    ("riddle", "plain"),
    [
        ("It keeps what ranks hold.", "What is there?"),
        ("1.5 s (95% 1.2 to 1.8)", "1.5 s (95% CI 1.2 to 1.8)"),
        ("one array a stage", "one array per stage"),
        ("the believed truth", "the estimated cost"),
        ("the next-best strategy", "the runner-up"),
        ("labelled neighbours", "labeled adjacent ranks"),
        ("the error of sources left out", "the leave-one-source-out error"),
    ],
)
def test_riddles_are_told_from_plain_words(riddle: str, plain: str) -> None:
    assert problems(riddle, "a.py:1")
    assert not problems(plain, "a.py:1")


def test_docs_and_help_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main() == 0, capsys.readouterr().out
