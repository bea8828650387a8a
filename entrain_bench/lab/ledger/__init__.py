"""The ledger: training runs that others measured and published, and what the cost model predicts for each."""
