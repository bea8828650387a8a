"""What a strategy is, what it may know, and the parts that strategies are built from."""
