"""Measurements of the suite itself: speed, fidelity, calibration, checks on GPUs."""
