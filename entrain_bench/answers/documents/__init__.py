"""Documents written from run records: ``entrain-bench figures claims results``.

- ``claims``: what the papers claim and what comes out here; ``claims.md`` and ``claims.csv``;
- ``results``: iteration times of all strategies; ``results.md``, and ``free_degrees.md`` on request.

They go to the folder of the results; ``entrain-bench reference`` takes them over into ``docs/``.
"""
