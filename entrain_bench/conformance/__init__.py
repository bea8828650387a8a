"""What every strategy must do, whoever wrote it, and how that is checked."""
