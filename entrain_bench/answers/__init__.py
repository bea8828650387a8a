"""From records to cases, comparisons, rankings and sentences, and their rendering."""
