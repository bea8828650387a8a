"""The check of words: what counts as a sentence, what is found in it, and that numbers only fall."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from prose import __main__ as prose
from prose.sentences import MAX_WORDS, hits, num_words, sentences

ROOT = Path(__file__).parents[2]
LONG = "word " * (MAX_WORDS + 1)


def test_code_comments_and_addresses_are_no_prose() -> None:
    text = "One `a b c` [two](three four).\n\n    anew anew\n\n```sh\nwhatever\n```\n\n<!-- alike -->\n\nThree."
    assert [sentence for _, sentence in sentences(text)] == ["One code two.", "Three."]
    assert hits(text) == []
    assert num_words(text) == 4


def test_items_cells_and_headings_are_texts_of_their_own_with_their_lines() -> None:
    text = "# Head\n\nFirst. Second\nline.\n\n- item one\n- item\n  two\n\n| a | b c |\n"
    assert [*sentences(text)] == [
        (1, "Head"), (3, "First."), (3, "Second line."), (6, "- item one"), (7, "- item two"), (10, "a"), (10, "b c"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LONG + ".", f"{MAX_WORDS + 1} words"),
        ("It is drawn anew.", "'anew': write again"),
        ("Nobody waits.", "'Nobody': write the actor"),
        ("This stands for it.", "'stands for'"),
        ("Run it as it is.", "'as it is'"),
    ],
)
def test_long_sentences_and_their_words_are_found(text: str, found: str) -> None:
    (hit,) = hits(f"Fine.\n\n{text}")
    assert hit.line == 3
    assert found in hit.problem


def test_a_list_that_continues_a_sentence_counts_with_it() -> None:
    item = "word " * 12
    text = f"Word:\n\n- {item};\n- {item};\n- {item}.\n"
    (hit,) = hits(text)
    assert (hit.line, hit.problem[:8]) == (1, "37 words")
    # Items that are sentences of their own, and a sentence that ends before them.
    assert hits(text.replace("- w", "- W")) == []
    assert hits(text.replace("Word:", "Word.").replace(";", ".")) == []


def test_what_is_fine_is_not_found() -> None:
    assert hits(f"{LONG[: 5 * MAX_WORDS].strip()}. Besides, renewal goes well.") == []


def test_numbers_may_only_fall() -> None:
    known = {"a.md": 3, prose.HAND_WRITTEN: 100}
    assert prose.grown({"a.md": 3, "b.md": 1, prose.HAND_WRITTEN: prose.LIMIT}, known) == {"b.md": 0}
    assert prose.grown({"a.md": 4, prose.HAND_WRITTEN: prose.LIMIT + 1}, known) == known
    # Until they are within the limit, they are shown only.
    assert prose.grown({prose.HAND_WRITTEN: prose.LIMIT + 2}, {prose.HAND_WRITTEN: prose.LIMIT + 1}) == {}


def test_generated_words_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "One two.\n\n<!-- table: x -->\nanew anew\n<!-- end -->\n\nAll alike.\n"
    for name in ("docs/x.md", "docs/claims/x.md", "README.md", "experiments/claim/x.yaml", *prose.COMMENTS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(page if name.endswith(".md") else "why: [It is anew., seed=range(2) a]  # so\n")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    texts = prose.read()
    assert [*texts][:3] == ["README.md", "docs/x.md", "experiments/claim/x.yaml"]
    assert [hit.line for hit in hits(texts["docs/x.md"])] == [7]
    assert texts["experiments/claim/x.yaml"] == "It is anew."
    assert prose.hand_written(texts) == 4


def test_help_is_checked_without_names() -> None:
    screen = "entrain-bench x\n\n  --all, -a     run everything\n                again\n  name=anew     other\n"
    assert [text for _, text in sentences(prose.described(screen))] == [
        "entrain-bench x",
        "run everything again",
        "other",
    ]


def test_a_new_hit_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"a.md": "Fine.\n\nDraw it anew.\n", "b.md": "All alike.\n"}
    monkeypatch.setattr(prose, "read", lambda: texts)
    monkeypatch.setattr(prose, "KNOWN", tmp_path / "known.yaml")
    assert prose.main(["--record"]) == 0
    assert "2 sentences and words to rewrite in 2 files" in capsys.readouterr().out
    texts["a.md"] += "\nAnd anew.\n"
    assert prose.main(["--record"]) == 1
    assert "a.md: 2, was 1" in capsys.readouterr().err
    texts["a.md"] = "Fine.\n"
    assert prose.main(["--record"]) == 0
    assert "a.md" not in (tmp_path / "known.yaml").read_text()


def test_docs_and_help_have_no_more_than_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main([]) == 0, capsys.readouterr().err


def test_docstrings_of_public_names_say_what_is_returned_or_represented_without_riddles() -> None:
    found = []
    paths = (path for folder in ("entrain_bench", "strategies", "workloads") for path in ROOT.glob(f"{folder}/**/*.py"))
    for path in sorted(paths):
        module = ast.parse(path.read_text())
        for node in (module, *public_nodes(module)):
            if re.match(r"(?:What|Who|Which)\b", ast.get_docstring(node) or ""):
                found.append(f"{path.relative_to(ROOT)} {getattr(node, 'name', 'itself')}")
    assert found == []


def public_nodes(node: ast.AST) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Functions, classes and methods whose names, and those around them, do not begin with an underscore."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public_nodes(child)
