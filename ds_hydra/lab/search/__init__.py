"""Galvatron-BMW's search over DP, SDP, TP, PP and activation checkpointing for every layer (arXiv
2307.02031v2).
"""

from ds_hydra.lab.search.galvatron import GalvatronSearch, SearchPlan, SearchSettings
from ds_hydra.lab.search.layers import LayerStrategy, SearchInput, layer_strategies

__all__ = [
    "GalvatronSearch",
    "LayerStrategy",
    "SearchInput",
    "SearchPlan",
    "SearchSettings",
    "layer_strategies",
]
