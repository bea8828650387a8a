"""Does training work on this machine's GPUs, how fast, how near are predictions: one report (``make gpu-check``)."""
