"""Foundations: arrays, arithmetic with the same bits everywhere, errors, files, time."""
