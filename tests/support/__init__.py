"""What tests share: builders, references, and processes."""
