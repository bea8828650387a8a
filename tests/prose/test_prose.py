"""The check of words: what counts as a sentence, and what is found in it."""

import pytest

from prose import __main__ as prose
from prose.__main__ import MAX_WORDS, described, leaves, problems, sentences

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


def test_docs_and_help_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main() == 0, capsys.readouterr().out
