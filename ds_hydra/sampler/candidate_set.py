"""Candidate strategies of a run: the one place where engine, `check`, `propose` and `simulate`
decide them.

Pure: what the model can run, what the hardware's interconnects are and which lengths the data has
are arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.propose import GroupLimits, KeptStrategy, Proposal, propose_among
from ds_hydra.sampler.sample_bench import CandidateSettings, TellProgress
from ds_hydra.strategy.cost_models.costs import Costs, World
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import check_context, usable_schemes
from ds_hydra.strategy.proposal.space import candidate_schemes, unpruned_schemes
from ds_hydra.strategy.schemes.enumeration import enumerate_strategies, power_of_two_schemes
from ds_hydra.strategy.schemes.placement import (
    LINK_GROUPS,
    MAX_GROUPS_OF_RANK,
    count_groups,
    groups_of_all,
    most_groups_of_rank,
)
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, schemes_of

_START_GROUPS_OF_RANK = 11
"""Groups of one rank that may be taken before the lengths are known: twelve are left for what these
suggest. Proposals of the 36 cases of the paper's Fig. 10 would have up to twelve.
"""


def gradient_bytes(config: HydraConfig) -> float:
    """Bytes of an element that is pushed."""
    return 2.0 if config.link.gradient_dtype == "bf16" else 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidate strategies of a run, and the profile that knows all of them.

    `reasons`: why each proposed strategy stays; empty where none was proposed. `assumed`: schemes
    of the strategies whose times nobody measured.
    """

    strategies: tuple[Strategy, ...]
    profile: Profile | None = None
    proposal: Proposal | None = None

    @property
    def reasons(self) -> tuple[KeptStrategy, ...]:
        """Reasons of the proposal, one for each strategy."""
        return () if self.proposal is None else self.proposal.kept

    @property
    def assumed(self) -> tuple[Scheme, ...]:
        """Sorted."""
        if self.profile is None:
            return ()
        return tuple(sorted(schemes_of(self.strategies) & self.profile.assumed))


def decide_candidates(
    profile: Profile | None,
    histogram: LengthHistogram | None,
    settings: CandidateSettings,
    progress: TellProgress | None = None,
) -> Candidates:
    """The candidates of a run.

    Given strategies as they are. Otherwise up to `max_enumerated` devices all strategies of two
    schemes <TP,PP>, and on top those of other schemes that make the lengths of `histogram` faster;
    on more devices what these lengths suggest. As long as profile or lengths are not known:
    strategies of two schemes, or of one scheme on more devices; where no <TP,PP> has room, of one
    of the others.

    Raises HydraConfigError where nothing fits the longest of the lengths, or the model runs no
    scheme.
    """
    world = None if profile is None else settings.world(profile)
    extended = None if world is None or settings.given else _extended(world, settings)
    if world is not None and histogram is not None:
        _check_longest(world, settings, extended)
    if settings.given:
        known = None if world is None else world.costs.extended(schemes_of(settings.given))
        return Candidates(strategies=settings.given, profile=known)
    start = _without_lengths(profile, settings)
    if world is None or extended is None or histogram is None or not _proposes(extended, settings):
        if not start and world is not None and extended is not None:  # nothing plain has room
            allowed = usable_schemes(extended, settings.space)  # what shares more, alone
            start = _within_limits(_of_one_scheme(allowed, settings), settings)
            return _checked(start, world.costs.extended(schemes_of(start)), settings)
        return _checked(start, profile, settings)
    gathered = extended.profile
    if settings.space == "full":
        # Phases are put together of schemes without checkpointed layers, dominated or not
        measured = world.measured
        on_nodes = (scheme for scheme in measured.profile.latency if scheme.hpz)
        gathered = measured.costs.table((*unpruned_schemes(measured, 0.0), *on_nodes))
    staying = () if settings.is_enumerated else settings.staying or start
    max_groups_of_rank = MAX_GROUPS_OF_RANK - LINK_GROUPS
    proposal = propose_among(
        extended,
        histogram,
        settings,
        start=start if settings.is_enumerated else (),
        limits=GroupLimits(
            settings.group_limit - settings.num_link_groups - count_groups(staying),
            max_groups_of_rank - most_groups_of_rank(groups_of_all(staying)),
        ),
        progress=progress,
        gathered=gathered,
    )
    known = world.costs.extended(schemes_of(proposal.strategies))
    return Candidates(strategies=proposal.strategies, profile=known, proposal=proposal)


def proposes(profile: Profile, settings: CandidateSettings) -> bool:
    """Whether the lengths of the data decide: on many devices, or where there are schemes beside
    <TP,PP>.
    """
    if settings.given or not settings.is_enumerated:
        return not settings.given
    return _proposes(_extended(settings.world(profile), settings), settings)


def _proposes(extended: World, settings: CandidateSettings) -> bool:
    """The same with all that a proposal may derive."""
    if not settings.is_enumerated:
        return True
    allowed = usable_schemes(extended, settings.space)
    return not (allowed and all(scheme.is_plain for scheme in allowed))


def check_longest(profile: Profile, settings: CandidateSettings) -> None:
    """Raise HydraConfigError where no scheme of any candidate fits a sequence of the context."""
    world = settings.world(profile)
    _check_longest(world, settings, None if settings.given else _extended(world, settings))


def find_cheapest_holding(profile: Profile, settings: CandidateSettings) -> Scheme | None:
    """The scheme that takes least time for a sequence of the context, of those that may be
    proposed; None where none fits.
    """
    extended = _extended(settings.world(profile), settings)
    context, known = settings.context_length, usable_schemes(extended, settings.space)
    return min(
        (scheme for scheme in known if extended.max_len_tokens(scheme) >= context),
        key=lambda scheme: extended.costs.latency(scheme).micro_batch_ms([context]),
        default=None,
    )


def _check_longest(world: World, settings: CandidateSettings, extended: World | None) -> None:
    """The same with all that a proposal may derive; None where strategies are given."""
    schemes = schemes_of(settings.given)
    known, is_full = world.costs.extended(schemes), False
    if extended is not None and _proposes(extended, settings):
        schemes = set(usable_schemes(extended, settings.space))
        is_full = settings.space == "full"
    elif extended is not None:
        schemes = set(_usable(world.profile, settings).latency)
    check_context(
        world.knowing(known),
        schemes,
        advises_full=not settings.given and not is_full,
        is_full=is_full,
        tokens_per_iteration=settings.tokens_per_iteration,
    )


def _without_lengths(profile: Profile | None, settings: CandidateSettings) -> tuple[Strategy, ...]:
    """All strategies of two schemes <TP,PP> that use every device; on many devices, or where there
    are none, those of one scheme.

    They need half of the groups at most: the rest is for forced strategies, or for what the lengths
    suggest.
    """
    number = settings.num_devices
    schemes = [s for s in power_of_two_schemes(number) if _is_usable(s, profile, settings)]
    wanted = list(enumerate_strategies(schemes, number)) if settings.is_enumerated else []
    if not wanted:  # on many devices, or where they are odd and one alone has no room: some idle
        wanted = _of_one_scheme(schemes, settings)
    return _within_limits(wanted, settings)


def _of_one_scheme(schemes: Iterable[Scheme], settings: CandidateSettings) -> list[Strategy]:
    """Strategies with as many pipelines of each of `schemes` as have room."""
    return [Strategy.alike(scheme, settings.num_devices) for scheme in schemes]


def _checked(
    strategies: tuple[Strategy, ...], profile: Profile | None, settings: CandidateSettings
) -> Candidates:
    if not strategies:
        raise HydraConfigError(
            f"no scheme that this model can run fits {settings.num_devices} devices; set "
            "hydra.strategies, or hydra.profile to another one"
        )
    return Candidates(strategies=strategies, profile=profile)


def _within_limits(
    strategies: Iterable[Strategy], settings: CandidateSettings
) -> tuple[Strategy, ...]:
    """Keep the `strategies` that need half of the groups at most, of one scheme first."""
    kept: list[Strategy] = []
    for strategy in sorted(strategies, key=lambda s: s.is_heterogeneous):
        keys = groups_of_all([*kept, strategy])
        if len(keys) > settings.group_limit // 2:
            continue
        if most_groups_of_rank(keys) <= _START_GROUPS_OF_RANK:
            kept.append(strategy)
    return tuple(kept)


def _is_usable(scheme: Scheme, profile: Profile | None, settings: CandidateSettings) -> bool:
    """Whether space, model, profile and memory allow `scheme`."""
    is_in_space = scheme.is_plain or settings.space != "plain"
    if not is_in_space or not settings.can_run(scheme):
        return False
    if profile is None:
        return True
    return scheme in profile.latency and profile.has_room(scheme, settings.num_devices)


def _usable(profile: Profile, settings: CandidateSettings) -> Profile:
    usable = (s for s in profile.latency if _is_usable(s, profile, settings))
    return Costs(profile).table(usable)


def _extended(world: World, settings: CandidateSettings) -> World:
    """The world of the usable part of its profile and of all that a proposal may derive from it.
    Schemes too large for memory are kept as sources: their T still serves to derive others.
    """
    if settings.space != "full":
        return world.knowing(_usable(world.profile, settings))
    measured = world.measured
    schemes = candidate_schemes(measured, settings.space, settings.num_tokens)
    return world.knowing(_usable(measured.costs.table(schemes), settings))
