"""``python -m tamper`` (``make tamper``): random changes to a folder of results; no changed number may be shown."""
