"""``entrain-bench claims [NAME ...] [KEY=VALUE ...]``: judge published claims, or show one with its commands."""

from __future__ import annotations

from pathlib import Path

from entrain_bench.answers.documents.claim import load_claims
from entrain_bench.answers.documents.claims import FINDINGS, claim_text, claims_text, read_claims
from entrain_bench.base.errors import unknown_choice
from entrain_bench.config.grammar import Folder, Request, Verb
from entrain_bench.config.tree import config_tree

# The committed findings: shown if a folder of results has none.
REFERENCE = config_tree().parent / "results" / "reference"

VERB = Verb(Folder, options=(), words="claims; without any, all", examples=["", "entrain_end_to_end"])


def main(request: Request[Folder]) -> int:
    """Print a line per claim and counts, or details of the named claims and groups; ``UserError`` for another name."""
    measured_here = Path(request.keys.results_dir) / FINDINGS
    path = measured_here if measured_here.exists() else REFERENCE / FINDINGS
    judged = read_claims(load_claims(), path)
    texts = []
    for name in request.words:
        named = [one for one in judged if name in (one.claim.name, one.claim.group)]
        if not named:
            names = {text for one in judged for text in (one.claim.name, one.claim.group) if text}
            raise unknown_choice("claim", name, names, "All: entrain-bench claims")
        texts.append(claims_text(named) if named[0].claim.group == name else claim_text(named[0]))
    print("\n\n".join(texts) or claims_text(judged))
    return 0
