"""``make bench``: how fast the suite itself is, with targets beside the measured values. No test asserts a time."""
