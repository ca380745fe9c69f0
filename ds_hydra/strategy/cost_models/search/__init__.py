"""Galvatron-BMW's search over DP, SDP, TP, PP and activation checkpointing for every layer (arXiv
2307.02031v2).
"""

from ds_hydra.strategy.cost_models.search.galvatron import (
    GalvatronSearch,
    SearchPlan,
    SearchSettings,
)
from ds_hydra.strategy.cost_models.search.layers import SearchInput
from ds_hydra.strategy.cost_models.search.space import LayerStrategy, layer_strategies

__all__ = [
    "GalvatronSearch",
    "LayerStrategy",
    "SearchInput",
    "SearchPlan",
    "SearchSettings",
    "layer_strategies",
]
