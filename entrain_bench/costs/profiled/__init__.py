"""Layer times that ``entrain-bench profile`` measured: file, and interpolation between points."""
