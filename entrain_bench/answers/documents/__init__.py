"""Documents written from run records: ``entrain-bench figures claims results``.

- ``claims``: verdicts on published claims (``verdict``); ``claims.md`` and ``claims/<paper>.md``;
- ``published``: the papers' numbers, cell by cell;
- ``claim``: a claim, its settings, and the one rule of fair ones;
- ``posterior``: P(fastest) over draws of the hardware constants; ``posterior.csv``;
- ``results``: iteration times of all strategies; ``results.md`` and ``tables/headline.md``.

They go to the folder of the results; ``entrain-bench reference`` takes them over into ``docs/``.
"""
