"""What other systems would do, and what no training run reaches: the core imports nothing of it."""
