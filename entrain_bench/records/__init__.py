"""Results of runs: metrics, records and their keys, tables, and views of them."""
