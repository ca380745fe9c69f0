"""Planner of a global batch by its lengths: strategies and phases, dispatch, packing."""

from ds_hydra.sampler.planner.iteration import plan_iteration

__all__ = ["plan_iteration"]
