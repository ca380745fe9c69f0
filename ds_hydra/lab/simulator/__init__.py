"""What an iteration would take on any cluster: event simulation of plans, baselines, paper cases,
what-if sweeps.
"""
