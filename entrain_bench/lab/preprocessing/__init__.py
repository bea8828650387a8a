"""What inputs cost training when ranks, their threads or other processes make them, measured on this machine."""
