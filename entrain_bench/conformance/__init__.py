"""Conformance tests that every strategy must pass."""
