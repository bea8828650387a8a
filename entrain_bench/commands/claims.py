"""``entrain-bench claims [NAME ...] [KEY=VALUE ...]``: judge published claims, or show one with its commands."""

from __future__ import annotations

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
    """Print a line per claim, counts and mismatches, or all on the named ones; a matrix stands for its cases.

    Returns 0; ``UserError`` for an unknown name.
    """
    claims = load_claims(request.config_dir)
    own = Path(request.keys.results_dir) / TABLE
    rows = read_rows(claims, own if own.exists() else REFERENCE / TABLE)
    known = {claim.name: (claim, row) for claim, row in zip(claims, rows, strict=True)}
    groups: dict[str, list[str]] = {}
    for claim in claims:
        groups.setdefault(claim.group, []).append(claim.name)
    texts = []
    for name in request.words:
        if name not in known and name not in groups:
            raise unknown_choice("claim", name, {**known, **groups})
        cases = [known[case] for case in groups.get(name, [])]
        texts.append(claims_text(*zip(*cases, strict=True)) if cases else claim_text(*known[name]))
    print("\n\n".join(texts) or claims_text(claims, rows))
    return 0
