"""What every rank does while it trains: builds its stages, takes each iteration's program, runs it, keeps the state."""
