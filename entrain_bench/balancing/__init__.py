"""The interface of strategies, the data that they may see (``Profile``), and their building blocks."""
