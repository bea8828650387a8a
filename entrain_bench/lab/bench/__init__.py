"""``make bench``: how fast the suite itself is, with targets next to the measured values. No test asserts a time."""
