"""``make bench``: how fast the harness itself is, with targets beside the measured values. No test asserts a time."""
