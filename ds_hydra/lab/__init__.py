"""Simulation of other systems, and all that no training run reaches: the core imports nothing of
it.
"""
