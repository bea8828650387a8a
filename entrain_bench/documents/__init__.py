"""Documents written from run records: ``python -m entrain_bench.documents``.

- ``claims``: what the papers claim and what comes out here; ``results/claims.csv`` and ``docs/claims.md``;
- ``results``: iteration times of all strategies; ``docs/results.md``.
"""
