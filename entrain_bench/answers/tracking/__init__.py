"""MLflow as a view of the run records: what it shows of them, and how its client logs that."""
