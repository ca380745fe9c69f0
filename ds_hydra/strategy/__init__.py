"""Pure values and decisions about strategies."""

from ds_hydra.strategy.profile import LatencyModel, MemoryModel, Profile
from ds_hydra.strategy.scheme import Scheme, Strategy, parse_strategies

__all__ = ["LatencyModel", "MemoryModel", "Profile", "Scheme", "Strategy", "parse_strategies"]
