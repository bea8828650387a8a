"""The cost model of passes, transfers and memory, for executors, and the estimates of strategies."""
