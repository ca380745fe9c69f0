"""Costs of computation and communication where nothing was measured."""
