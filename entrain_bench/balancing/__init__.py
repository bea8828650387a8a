"""The interface of strategies, what they may see (``Profile``), and their building blocks."""
