"""Pure values and decisions about strategies."""

from ds_hydra.strategy.profiles.memory_model import MemoryModel
from ds_hydra.strategy.profiles.profile import LatencyModel, Profile
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, parse_strategies

__all__ = ["LatencyModel", "MemoryModel", "Profile", "Scheme", "Strategy", "parse_strategies"]
