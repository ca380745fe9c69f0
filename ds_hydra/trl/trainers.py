"""TRL's trainers with HydraMixin."""

from __future__ import annotations

from trl import DPOTrainer, GRPOTrainer, SFTTrainer

from ds_hydra.trl.mixin import HydraMixin


class HydraSFTTrainer(HydraMixin, SFTTrainer):
    """TRL's SFTTrainer on HydraEngine."""


class HydraDPOTrainer(HydraMixin, DPOTrainer):
    """TRL's DPOTrainer on HydraEngine."""


class HydraGRPOTrainer(HydraMixin, GRPOTrainer):
    """TRL's GRPOTrainer on HydraEngine, with rollouts from outside: `rollout_func`, or vLLM."""
