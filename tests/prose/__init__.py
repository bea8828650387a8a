"""The check of words in ``make lint``: sentences and words that a reader of docs and help stumbles over."""
