"""How far simulated seconds are from published ones."""

# Of docs/calibration.md, whose generation checks it.
MODEL_ERROR = "model error: not measured"
