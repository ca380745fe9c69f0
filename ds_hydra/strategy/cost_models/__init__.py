"""What computation and communication cost where nothing was measured."""
