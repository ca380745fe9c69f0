"""Candidate strategies of a run: the one place where engine, `check`, `propose` and `simulate`
decide them.

Pure: what the model can run, what the hardware's interconnects are and which lengths the data has
are arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

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


class CandidateSpace:
    """The World of a run, and the schemes that its candidates may have."""

    def __init__(self, profile: Profile, settings: CandidateSettings) -> None:
        self.settings, self.world = settings, settings.world(profile)

    @cached_property
    def extended(self) -> World:
        """The World of the usable part of the profile and of all that a proposal may derive from
        it. Schemes too large for memory are kept as sources: their T still serves to derive others.
        """
        measured, settings = self.world.measured, self.settings
        if settings.space != "full":
            return self.world.knowing(_usable(self.world.profile, settings))
        schemes = candidate_schemes(measured, settings.space, settings.num_tokens)
        return self.world.knowing(_usable(measured.costs.table(schemes), settings))

    @cached_property
    def schemes(self) -> Sequence[Scheme]:
        """Schemes that a proposal may choose among."""
        return usable_schemes(self.extended, self.settings.space)

    @property
    def proposes(self) -> bool:
        """Whether the lengths of the data decide: on many devices, or where there are schemes
        beside <TP,PP>.
        """
        if self.settings.given or not self.settings.is_enumerated:
            return not self.settings.given
        return not (self.schemes and all(scheme.is_plain for scheme in self.schemes))

    def check_longest(self) -> None:
        """Raise HydraConfigError where no scheme of any candidate fits a sequence of the
        context.
        """
        settings, proposes = self.settings, self.proposes
        schemes = schemes_of(settings.given)
        known = self.world.costs.extended(schemes)
        if proposes:
            schemes = set(self.schemes)
        elif not settings.given:
            schemes = set(_usable(self.world.profile, settings).latency)
        is_full = proposes and settings.space == "full"
        check_context(
            self.world.knowing(known),
            schemes,
            advises_full=not settings.given and not is_full,
            is_full=is_full,
            tokens_per_iteration=settings.tokens_per_iteration,
        )

    def find_cheapest_holding(self) -> Scheme | None:
        """The scheme that takes least time for a sequence of the context, of those that may be
        proposed; None where none fits.
        """
        context, extended = self.settings.context_length, self.extended
        return min(
            (scheme for scheme in self.schemes if extended.max_len_tokens(scheme) >= context),
            key=lambda scheme: extended.costs.latency(scheme).micro_batch_ms([context]),
            default=None,
        )


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
    space = None if profile is None else CandidateSpace(profile, settings)
    if space is not None and histogram is not None:
        space.check_longest()
    if settings.given:
        known = None if space is None else space.world.costs.extended(schemes_of(settings.given))
        return Candidates(strategies=settings.given, profile=known)
    start = _without_lengths(profile, settings)
    if space is None or histogram is None or not space.proposes:
        if not start and space is not None:  # nothing plain has room: what shares more, alone
            start = _within_limits(_of_one_scheme(space.schemes, settings), settings)
            profile = space.world.costs.extended(schemes_of(start))
        if not start:
            raise HydraConfigError(
                f"no scheme that this model can run fits {settings.num_devices} devices; set "
                "hydra.strategies, or hydra.profile to another one"
            )
        return Candidates(strategies=start, profile=profile)
    gathered = space.extended.profile
    if settings.space == "full":
        # Phases are put together of schemes without checkpointed layers, dominated or not
        measured = space.world.measured
        on_nodes = (scheme for scheme in measured.profile.latency if scheme.hpz)
        gathered = measured.costs.table((*unpruned_schemes(measured, 0.0), *on_nodes))
    staying = () if settings.is_enumerated else settings.staying or start
    max_groups_of_rank = MAX_GROUPS_OF_RANK - LINK_GROUPS
    proposal = propose_among(
        space.extended,
        histogram,
        settings,
        start=start if settings.is_enumerated else (),
        limits=GroupLimits(
            settings.group_limit - settings.num_link_groups - count_groups(staying),
            max_groups_of_rank - most_groups_of_rank(groups_of_all(staying)),
        ),
        gathered=gathered,
        progress=progress,
    )
    known = space.world.costs.extended(schemes_of(proposal.strategies))
    return Candidates(strategies=proposal.strategies, profile=known, proposal=proposal)


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
