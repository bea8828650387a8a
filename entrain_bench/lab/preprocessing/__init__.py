"""Time that training waits for inputs made by ranks, their threads or other processes, measured on this machine."""
