"""Documents written from run records: ``entrain-bench figures claims results``.

- ``claims``: verdicts on published claims; ``claims.csv``, ``claims.md`` and ``claims/<paper>.md``;
- ``results``: iteration times of all strategies; ``results.md``, and ``free_degrees.md`` on request.

They go to the folder of the results; ``entrain-bench reference`` takes them over into ``docs/``.
"""
