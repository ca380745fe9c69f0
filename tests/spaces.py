"""Profiles that know all schemes of a space, for tests of schemes that nobody measured."""

from __future__ import annotations

from dataclasses import replace

from ds_hydra.strategy.cost_models.cluster import Cluster
from ds_hydra.strategy.cost_models.costs import CanRun, Costs, World, runs_all
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.space import candidate_schemes, unpruned_schemes
from ds_hydra.strategy.schemes.scheme import parse_strategies, schemes_of


def full_space(
    profile: Profile,
    *,
    num_devices: int,
    context_length: int,
    cluster: Cluster | None = None,
    can_run: CanRun = runs_all,
    tokens_per_iteration: float | None = None,
) -> Profile:
    """What a proposal compares."""
    world = World.of(profile, cluster, num_devices, context_length)
    schemes = candidate_schemes(replace(world, can_run=can_run), "full", tokens_per_iteration)
    return world.measured.costs.table(schemes)


def with_moving_weights(
    profile: Profile,
    *,
    num_devices: int,
    cluster: Cluster | None,
    can_run: CanRun = runs_all,
    tokens_per_iteration: float = 0,
) -> Profile:
    """`profile` with every scheme that gathers, for so many tokens."""
    world = replace(World.of(profile, cluster, num_devices, 1), can_run=can_run)
    found = unpruned_schemes(world, tokens_per_iteration)
    moving = [scheme for scheme in found if scheme.gather]
    return world.costs.table((*profile.latency, *moving))


def priced(profile: Profile, *texts: str, cluster: Cluster | None = None) -> Profile:
    """`profile` with the schemes of these strategies."""
    return Costs(profile, cluster).extended(schemes_of(parse_strategies(texts)))
