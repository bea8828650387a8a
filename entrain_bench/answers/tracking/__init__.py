"""MLflow as a view of the run records: what it shows of them, and how it gets into a store or to a server."""
