"""What is trained (models) and on what (clusters): constants and what follows from them, no behaviour."""
