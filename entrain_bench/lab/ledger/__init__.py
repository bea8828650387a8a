"""The ledger: published training runs, and the cost model's prediction of each."""
