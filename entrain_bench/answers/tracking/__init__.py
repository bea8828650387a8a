"""MLflow as a view of the run records: the logged values, and how its client logs them."""

from pathlib import Path

from entrain_bench.records.records import Results


def store_path(results: Results) -> Path:
    """Return the SQLite file of a results folder."""
    return results.root / "mlflow.db"
