"""What is said to the SQLite file of an MLflow store: the tables of runs and experiments, and how they are read."""

# Rows of a run, its own before those that refer to it. MLflow keeps every number twice: all, and the last of each name.
INSERT = {
    "runs": (
        "INSERT INTO runs (run_uuid, name, source_type, source_name, entry_point_name, user_id, status, start_time,"
        " end_time, source_version, lifecycle_stage, artifact_uri, experiment_id)"
        " VALUES (?, ?, 'LOCAL', '', '', '', ?, ?, ?, '', 'active', ?, ?)"
    ),
    "tags": "INSERT INTO tags (run_uuid, key, value) VALUES (?, ?, ?)",
    "params": "INSERT INTO params (run_uuid, key, value) VALUES (?, ?, ?)",
    "metrics": "INSERT INTO metrics (run_uuid, key, value, is_nan, timestamp, step) VALUES (?, ?, ?, ?, ?, ?)",
    "latest_metrics": (
        "INSERT INTO latest_metrics (run_uuid, key, value, is_nan, timestamp, step) VALUES (?, ?, ?, ?, ?, ?)"
    ),
}
DELETE = (
    "DELETE FROM latest_metrics WHERE run_uuid = ?",
    "DELETE FROM metrics WHERE run_uuid = ?",
    "DELETE FROM params WHERE run_uuid = ?",
    "DELETE FROM tags WHERE run_uuid = ?",
    "DELETE FROM runs WHERE run_uuid = ?",
)
SET_TAG = "INSERT OR REPLACE INTO tags (run_uuid, key, value) VALUES (?, ?, ?)"
SET_EXPERIMENT_TAG = "INSERT OR REPLACE INTO experiment_tags (experiment_id, key, value) VALUES (?, ?, ?)"
EXPERIMENT = "SELECT experiment_id FROM experiments WHERE name = ?"
RESTORE_EXPERIMENT = "UPDATE experiments SET lifecycle_stage = 'active' WHERE name = ? AND lifecycle_stage = 'deleted'"
INSERT_EXPERIMENT = (
    "INSERT INTO experiments (name, artifact_location, lifecycle_stage, creation_time, last_update_time)"
    " VALUES (?, ?, 'active', ?, ?)"
)
# Experiments with runs, the last logged first, each with the run whose tag has a value.
EXPERIMENTS = """
    SELECT e.experiment_id, e.name, MAX(CASE WHEN t.value = ? THEN r.run_uuid ELSE '' END)
    FROM experiments e
    JOIN runs r ON r.experiment_id = e.experiment_id AND r.lifecycle_stage = 'active'
    LEFT JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = ?
    WHERE e.lifecycle_stage = 'active'
    GROUP BY e.experiment_id, e.name
    ORDER BY MAX(r.start_time) DESC, e.experiment_id DESC
"""
# Runs of an experiment with four of their tags.
RUNS = """
    SELECT
        r.run_uuid,
        MAX(CASE WHEN t.key = ? THEN t.value ELSE '' END),
        MAX(CASE WHEN t.key = ? THEN t.value ELSE '' END),
        MAX(CASE WHEN t.key = ? THEN t.value ELSE '' END),
        MAX(CASE WHEN t.key = ? THEN t.value ELSE '' END)
    FROM runs r
    JOIN tags t ON t.run_uuid = r.run_uuid
    WHERE r.experiment_id = ? AND r.lifecycle_stage = 'active'
    GROUP BY r.run_uuid
"""
