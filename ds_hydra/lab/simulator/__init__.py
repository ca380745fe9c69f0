"""Simulation of iterations on any cluster: event simulation of plans, baselines, paper cases."""
