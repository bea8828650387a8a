"""Documents written from run records: claims, measured tables, results, and P(fastest) over draws of constants."""
