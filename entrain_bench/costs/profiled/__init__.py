"""Layer times that ``entrain-bench profile`` measured: their file, what lies between its points, and the residuals."""
