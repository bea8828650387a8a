"""Fitting the cost model to published times: what was published, what is predicted, and the constants in between."""
