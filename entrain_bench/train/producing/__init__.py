"""Values made in processes apart from the ranks, and handed over in memory that both map."""
