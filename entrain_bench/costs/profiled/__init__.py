"""Layer times that ``entrain-bench profile`` measured: file, interpolation between points, and residuals."""
