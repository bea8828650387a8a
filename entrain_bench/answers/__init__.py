"""Records turned into cases, comparisons, rankings and sentences, and what renders them."""
