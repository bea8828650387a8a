"""Figures of papers, drawn from run records and workload analyses: ``entrain-bench figures``.

Every module here whose name has no leading underscore is a figure and defines:

- ``EXPERIMENT``: its sweep, ``experiments/figure/<EXPERIMENT>.yaml``, or several if that has ``figure.rows``;
- ``RUNS``: whether the cells of the sweep must have been run;
- ``TIMELINES``: whether it reads timelines (``run_actions``); may be left out if not;
- ``load(cells, results)``: the tidy data of the cells, which come by the labels of the rows if there are any;
- ``draw(data)``: the matplotlib figure and its data as a table, a pure function.
"""
