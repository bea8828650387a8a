"""Specifications of models and clusters: constants and values that follow from them, no behavior."""
