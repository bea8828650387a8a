"""Real data: from a data set's files to a shape trace, by headers alone (docs/workloads.md)."""
