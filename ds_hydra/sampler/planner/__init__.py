"""From the lengths of a global batch to its plan: strategies and phases, dispatch, packing."""

from ds_hydra.sampler.planner.iteration import plan_iteration

__all__ = ["plan_iteration"]
