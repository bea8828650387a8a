"""``entrain-bench claims [NAME ...] [KEY=VALUE ...]``: verdicts on published claims; details and commands of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from entrain_bench.answers.documents.claim_pages import claim_text, claims_text
from entrain_bench.answers.documents.claims import TABLE, load_claims, read_rows
from entrain_bench.base.errors import unknown_choice
from entrain_bench.config.grammar import Folder, Request, Verb
from entrain_bench.config.tree import config_tree

# As committed: of results that nobody has measured here.
REFERENCE = config_tree().parent / "results" / "reference"


VERB = Verb(Folder, words="claims; without any, all", examples=["", "entrain_end_to_end"])


def main(request: Request[Folder]) -> int:
    """Print the counts and a line per claim, or everything on the named claims; returns 0.

    Raises:
        UserError: for an unknown name, with the nearest one.
    """
    print(text(request.words, Path(request.keys.results_dir), request.config_dir))
    return 0


def text(names: Sequence[str], results: Path, config_dir: str | None) -> str:
    """What is printed: of the claims in a folder of results, or the committed ones if it holds none."""
    claims = load_claims(config_dir)
    folder = results if (results / TABLE).exists() else REFERENCE
    rows = read_rows(claims, folder / TABLE)
    if not names:
        return claims_text(claims, rows)
    known = {claim.name: (claim, row) for claim, row in zip(claims, rows, strict=True)}
    for name in names:
        if name not in known:
            raise unknown_choice("claim", name, known)
    return "\n\n".join(claim_text(*known[name]) for name in names)
