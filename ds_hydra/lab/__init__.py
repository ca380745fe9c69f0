"""Simulation of other systems, and all else beyond training runs: the core imports none of it."""
