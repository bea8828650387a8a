"""What tests of training share: ranks, programs on four of them, references, and planted trouble."""
