"""What a sweep is called, and what it is made of."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from entrain_bench.answers.text import count, listing
from entrain_bench.records.records import LABELS, Record

# Overrides that say nothing about what is swept.
ASIDE = ("results_dir=", "mlflow", "retry=", "hydra")
# MLflow takes 500 characters; the page is readable with fewer.
MAX_NAME = 160


def sweep_name(overrides: Sequence[str]) -> str:
    """What a sweep is called: its figure if it is just that, else its overrides; ``defaults`` without any."""
    texts = [text for text in overrides if not text.lstrip("+").startswith(ASIDE)]
    name = texts[0].removeprefix("figure=") if len(texts) == 1 else " ".join(texts)
    return shortened(name) or "defaults"


def shortened(name: str) -> str:
    """A name that is not too long for a page or a file, and is another one for another name."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}... {digest}"


def describe_sweep(records: Sequence[Record]) -> str:
    """What a sweep is made of, in one sentence."""
    parts = []
    for name in LABELS:
        values = list(dict.fromkeys(str(record.labels[name]) for record in records))
        plural = {"strategy": "strategies", "harness": "harnesses"}.get(name, f"{name}s")
        one = len(values) == 1
        parts.append(f"{name} {values[0]}" if one else f"{len(values)} {plural} ({listing(values, 'and')})")
    states = Counter(record.status for record in records)
    return f"{', '.join(parts)}: " + ", ".join(f"{count(n, 'run')} {status}" for status, n in sorted(states.items()))
