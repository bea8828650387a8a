"""Random command lines and malformed traces: whatever is typed ends with a result or one line (``make fuzz``)."""
