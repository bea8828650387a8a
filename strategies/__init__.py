"""The compared systems, one file or package each; they depend on entrain_bench only."""
