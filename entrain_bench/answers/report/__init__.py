"""One page that answers which strategy to use: rows of runs in, HTML and Markdown out."""
