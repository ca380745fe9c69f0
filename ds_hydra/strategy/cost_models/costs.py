"""Cost of a scheme, computed on demand: T of one stage, and the origin of T.

T of a scheme that the profile has no entry for is a share of what it has one for, and what each
kind of parallelism moves beside it:

    TP        in T of <TP,PP>, which is measured, or a roofline (`analytic.predict_latency`)
    PP        each stage has its layers; hand-over is no part of T (`Cluster.hop_ms`)
    SP        all-to-alls of queries, keys, values and outputs, those of some heads beside attention
              to others, over the links between the ranks of a group
    CP        keys and values of other rows over the ring of CP ranks, beside attention
    EP        tokens to their experts and back over the link of EP ranks
    weights   layers that all ranks gather, for each micro-batch, beside its computation
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from ds_hydra.strategy.cost_models.analytic import (
    KEY_VALUE_EXCHANGES,
    expert_parallel_latency,
    key_values_ms,
    sequence_parallel_latency,
)
from ds_hydra.strategy.cost_models.cluster import Cluster, try_cluster
from ds_hydra.strategy.profiles.memory_model import MOST_KEY_VALUE_PARTS, key_value_parts
from ds_hydra.strategy.profiles.profile import LatencyModel, Profile
from ds_hydra.strategy.schemes.scheme import (
    FORWARD_FRACTION,
    Scheme,
    slowest_stage_ratios,
    stage_layers,
)

CanRun = Callable[[Scheme], bool]


def runs_all(_: Scheme) -> bool:
    """Accept every scheme, for a model of which nothing is known."""
    return True


_ROW_TOKENS = 8192
"""Tokens of a CP rank's row over which the starts of hidden exchanges are spread."""
_SEEN_EXCHANGES = 2
"""Exchanges of CP for each layer that attention does not hide, with the first part: its gather in
forward, and in backward the sum of its gradients. Keys that backward gathers travel beside the
layer's MLP.
"""


_REFERENCE_TOKENS = 32768
"""Length for which the cheapest <1,PP> is looked for."""
_FITTED_TOKENS = 2048
"""Length that micro-batches of few ranks hold, so that a fit of their times is right there."""


class Price(NamedTuple):
    """T of a scheme and its origin.

    "measured" and "roofline" are entries of the profile. "derived" is T of `sources[0]` with other
    layers in a stage or other traffic; "estimated" is more than that, from T of `sources`.
    """

    latency: LatencyModel
    origin: Literal["measured", "roofline", "derived", "estimated"]
    sources: tuple[Scheme, ...] = ()

    @property
    def marks(self) -> dict[str, Any]:
        """Marks of the entry in a profile's document."""
        if self.origin == "derived":
            return {"derived_from": str(self.sources[0])}
        return {"estimated": True}


class Costs:
    """Prices of all schemes of one model on one cluster, each found once.

    `cluster` is None where nothing is known of the interconnects: what only these tell has no price
    then, and layers that come over them count nothing.
    """

    def __init__(self, profile: Profile, cluster: Cluster | None = None) -> None:
        self.profile, self.cluster = profile, cluster
        self._prices: dict[Scheme, Price | None] = {}

    @classmethod
    def of(cls, profile: Profile, num_devices: int) -> Costs:
        """Costs on the interconnects of the profile's hardware, where that is described."""
        return cls(profile, try_cluster(profile, num_devices))

    @cached_property
    def measured(self) -> Costs:
        """The same without entries that the profile has derived or estimated before."""
        if not self._assumed:
            return self
        measured = (s for s in self.profile.latency if s not in self._assumed)
        return Costs(self.table(measured), self.cluster)

    @cached_property
    def _assumed(self) -> frozenset[Scheme]:
        return self.profile.assumed

    @cached_property
    def _source(self) -> Literal["measured", "roofline"]:
        return "roofline" if self.profile.document.get("estimated") else "measured"

    def find(self, scheme: Scheme) -> Price | None:
        """The price of `scheme`; None where nothing tells it."""
        # None is an answer, which is remembered as well
        if scheme not in self._prices:
            self._prices[scheme] = self._price(scheme)
        return self._prices[scheme]

    def latency(self, scheme: Scheme) -> LatencyModel:
        """T of `scheme`; raises HydraConfigError naming the schemes that were profiled."""
        price = self.find(scheme)
        # Without a price the profile is asked: it derives T, or names what was profiled
        return self.profile.get_latency(scheme) if price is None else price.latency

    def table(self, schemes: Iterable[Scheme]) -> Profile:
        """A profile with entries of exactly `schemes`, in their order: those of this profile as
        they are, the others marked as derived or estimated.

        Raises HydraConfigError naming what is lacking for one of them.
        """
        wanted = tuple(dict.fromkeys(schemes))
        known = {Scheme.from_json(entry): entry for entry in self.profile.document["schemes"]}
        # The same object: whatever it has remembered of MaxLen is kept
        if wanted == tuple(known):
            return self.profile
        latency, entries = {}, []
        for scheme in wanted:
            latency[scheme] = self.latency(scheme)
            entry = known.get(scheme)
            if entry is None:
                price = self.find(scheme)
                # For what has no price `latency` has raised
                assert price is not None
                entry = {**scheme.to_json(), **price.latency.to_json(), **price.marks}
            entries.append(entry)
        document = {**self.profile.document, "schemes": entries}
        return replace(self.profile, latency=latency, document=document)

    def extended(self, schemes: Iterable[Scheme]) -> Profile:
        """The profile with entries of `schemes`, sorted, on top of its own; itself where it has all
        of them. Raises HydraConfigError naming the missing input of one of them.
        """
        known = self.profile.latency
        more = sorted({*schemes} - known.keys())
        for scheme in more:
            # For what both raise: what is not known would be found out while planning
            self.latency(scheme)
            self.profile.max_len_tokens(scheme, scheme.num_devices)
        return self.table((*known, *more))

    def _price(self, scheme: Scheme) -> Price | None:
        if (entry := self.profile.latency.get(scheme)) is not None:
            return Price(entry, "estimated" if scheme in self._assumed else self._source)
        # One option is taken away after another, and each price asks for the one without it
        if scheme.stages or scheme.ckpt:
            return self._of_stages(scheme)
        if scheme.hpz:
            return self._of_weights_on_nodes(scheme)
        if scheme.gather:
            return self._of_moving_weights(scheme)
        if scheme.ep > 1:
            return self._of_shared_experts(scheme)
        if scheme.cp > 1:
            return self._of_rows(scheme)
        return self._of_sequence_shards(scheme) if scheme.sp > 1 else None

    def _of_stages(self, scheme: Scheme) -> Price | None:
        """Computation of uneven stages and checkpointed layers is that of the slowest stage; what
        attention takes does not run again. What is offloaded travels to the host beside forward,
        and back beside backward, which take as long at least.
        """
        source = replace(scheme, stages=(), ckpt=0)
        if (base := self.find(source)) is None:
            return None
        ratios = slowest_stage_ratios(scheme, self.profile.memory.num_layers)
        latency = base.latency.scaled(*ratios)
        if scheme.offload and self.cluster is not None and self.cluster.hardware.host_rate:
            memory, rate = self.profile.memory, self.cluster.hardware.host_rate
            # As for T, the stage that has most decides
            most = max(s.num_checkpointed for s in stage_layers(scheme, memory.num_layers))
            moved_ms = 1e3 * most * memory.checkpointed_bytes(scheme) / rate
            # Layers run again inside of backward, so forward is that without checkpoints
            forward_ms = FORWARD_FRACTION * base.latency.linear_ms
            passes_ms = (forward_ms, latency.linear_ms - forward_ms)
            linear_ms = sum(max(pass_ms, moved_ms) for pass_ms in passes_ms)
            latency = replace(latency, linear_ms=linear_ms)
        return Price(latency, "derived", (source,))

    def _of_moving_weights(self, scheme: Scheme) -> Price | None:
        """Price of the scheme whose weights stay, or of one rank with the exchanges of SP and CP
        added to its share. No micro-batch takes less than its weights travel.
        """
        plain = replace(scheme, gather=False)
        single = self.single_rank
        # Of one rank's T only SP and CP are even shares: TP and experts have prices of their own
        if plain != plain.without_options() or not plain.tp == plain.pp == plain.ep == 1:
            single = None
        if self.cluster is None or single is None:
            base = self.find(plain)
            price = base and Price(base.latency, "derived", (plain,))
        else:
            shared = self._with_key_values(single.shared(plain.num_shards), plain)
            price = Price(self.with_exchanges(shared, plain), "estimated", (Scheme(1, 1),))
        if price is None or self.cluster is None:
            return price
        traffic_ms = self.cluster.gather_ms(scheme)
        of_nodes_ms = self.cluster.gather_ms(scheme.staying)
        # 0 for hpz where it saves nothing, so that no memory is spent on it
        latency = replace(
            price.latency,
            traffic_ms=traffic_ms,
            hpz_traffic_ms=of_nodes_ms if of_nodes_ms < traffic_ms else 0.0,
        )
        return price._replace(latency=latency)

    def _of_weights_on_nodes(self, scheme: Scheme) -> Price | None:
        """T of the scheme whose weights cross between nodes for every pass, with less traffic."""
        price = self.find(scheme.crossing)
        return price and Price(price.latency.on_nodes, "derived", (scheme.crossing,))

    def _of_shared_experts(self, scheme: Scheme) -> Price | None:
        """T without `ep`, and tokens that travel evenly."""
        source = replace(scheme, ep=1)
        cluster, base = self.cluster, self.find(source)
        if base is None or cluster is None or cluster.shape.experts is None:
            return None
        more = expert_parallel_latency(cluster.shape, cluster.hardware, scheme)
        return Price(base.latency.plus(more), "estimated", (source,))

    def _of_sequence_shards(self, scheme: Scheme) -> Price | None:
        """T of `scheme` from those of the same PP without SP, or None where <TP,PP> has none.

        SP ranks share what a micro-batch computes, its tokens and in attention its heads: a / SP
        and b / SP of <TP,PP>. What <SP x TP,PP> takes beyond that for each token is communication,
        of which n = SP ranks need 1 / n: a layer exchanges four tensors of S H / n elements, where
        TP reduces two of S H in rings, which sends twice as much. Between nodes a ring has the
        interconnect of a node for itself, exchanges of all ranks of a node share it: they take what
        they do by the interconnects, if that is more. The constant is the larger one of both,
        because neither launches nor collectives get fewer. Heads travel in parts, beside attention
        to the part before (`_with_carried`). Where <SP x TP,PP> has no T, exchanges count by the
        interconnects alone.
        """
        narrow, wide = Scheme(scheme.tp, scheme.pp), Scheme(scheme.ranks_per_stage, scheme.pp)
        base, group = self.profile.latency.get(narrow), self.profile.latency.get(wide)
        if base is None:
            return None
        latency = base.shared(scheme.sp)
        if group is None:
            return Price(self.with_exchanges(latency, scheme), "estimated", (narrow,))
        # Times of two measurements: their difference may be below 0
        exchange_ms = max(0.0, group.linear_ms - latency.linear_ms) / scheme.sp
        is_near = scheme.sp * scheme.sp_step <= self._devices_per_node
        exchange_ms = max(exchange_ms, 0.0 if is_near else self._exchange_ms(scheme))
        latency = replace(latency, constant_ms=max(base.constant_ms, group.constant_ms))
        latency = self._with_carried(latency, scheme, exchange_ms)
        return Price(latency, "estimated", (narrow, wide))

    def _of_rows(self, scheme: Scheme) -> Price | None:
        """T of `scheme` from that without CP, which CP ranks share, and from <CP x SP x TP,PP>.

        CP ranks gather keys and values of a micro-batch, in backward again, and give away their
        gradients: 6 numbers a token and layer of K H / (SP x TP), K key-value heads a query head,
        where each of n = CP x SP x TP ranks of a TP group sends 8 H (n - 1) / n in its all-reduces.
        What <n,PP> takes beyond its share of <TP,PP> is 8 H (n - TP) / n. Between nodes the SP x TP
        rings of a node share the interconnect that the TP group's has for itself. Where <n,PP> has
        no T the interconnects tell how fast numbers travel; None where these are not known either.
        """
        if scheme.context_first:
            return self._of_distant_sequence_shards(scheme)
        uncut, num_ranks = replace(scheme, cp=1), scheme.ranks_per_stage
        narrow, wide = Scheme(scheme.tp, scheme.pp), Scheme(num_ranks, scheme.pp)
        base, group = self.find(uncut), self.profile.latency.get(wide)
        alone = self.profile.latency.get(narrow)
        if base is None:
            return None
        # Bytes over the interconnects, where no TP group tells how fast they travel
        if group is None or alone is None:
            shared = base.latency.shared(scheme.cp)
            if self.cluster is None:
                return None
            return Price(self._with_key_values(shared, scheme), "estimated", (uncut,))
        # Of the TP group beyond its share: 8 H (n - TP) / n numbers, `reduced` below
        excess_ms = max(0.0, group.linear_ms - alone.linear_ms * scheme.tp / num_ranks)
        width = scheme.sp * scheme.tp
        sharing = min(width, self._devices_per_node) if num_ranks > self._devices_per_node else 1
        gathered = 6 * self.profile.memory.key_value_share * sharing / width * (1 - 1 / scheme.cp)
        reduced = 8 * (1 - scheme.tp / num_ranks)
        seen_ms, hidden_ms = self._seen_and_hidden(scheme, excess_ms * gathered / reduced)
        shared = base.latency.shared(scheme.cp)
        latency = replace(
            shared,
            linear_ms=shared.linear_ms + seen_ms,
            # Neither launches nor collectives get fewer when a micro-batch is shared
            constant_ms=max(shared.constant_ms, group.constant_ms) + self._pieces_ms(scheme),
            hidden_ms=hidden_ms,
        )
        return Price(latency, "estimated", (uncut, narrow, wide))

    def _of_distant_sequence_shards(self, scheme: Scheme) -> Price | None:
        """Price where CP ranks are neighbours: that without CP, which they share, with keys and
        values that travel between them, and the additional exchanges of SP. Inside a node the order
        of ranks changes nothing.
        """
        near = replace(scheme, context_first=False)
        if scheme.ranks_per_stage <= self._devices_per_node:
            price = self.find(near)
            return price and Price(price.latency, "derived", (near,))
        uncut = replace(near, cp=1)
        if (price := self.find(uncut)) is None or self.cluster is None:
            return None
        latency = self._with_key_values(price.latency.shared(scheme.cp), scheme)
        # `uncut` has the exchanges between neighbours; CP ranks in between make them dearer
        more_ms = self._exchange_ms(scheme) - self._exchange_ms(uncut) / scheme.cp
        latency = self._with_carried(latency, scheme, max(0.0, more_ms))
        return Price(latency, "estimated", (uncut,))

    @property
    def _devices_per_node(self) -> int:
        return self.profile.memory.devices_per_node

    def _exchange_ms(self, scheme: Scheme) -> float:
        """Milliseconds of exchanges for a token, by the interconnects; 0 where unknown."""
        if self.cluster is None:
            return 0.0
        shape, hardware = self.cluster.shape, self.cluster.hardware
        more = sequence_parallel_latency(shape, hardware, scheme)
        return 0.0 if more is None else more.linear_ms

    def with_exchanges(self, latency: LatencyModel, scheme: Scheme) -> LatencyModel:
        """`latency` of a group without communication, with the exchanges of SP ranks on top."""
        if self.cluster is None or scheme.sp == 1:
            return latency
        more = sequence_parallel_latency(self.cluster.shape, self.cluster.hardware, scheme)
        # None is for SP 1 alone
        assert more is not None
        carried = self._with_carried(latency, scheme, more.linear_ms)
        # Parts behind the first start beside attention: spread over the tokens of a usual row
        num_hidden = len(self.profile.memory.key_value_parts(scheme)) - 1
        starts_ms = num_hidden * more.constant_ms / (scheme.ranks_per_stage * _ROW_TOKENS)
        return replace(
            carried,
            exchange_ms=carried.exchange_ms + starts_ms,
            constant_ms=carried.constant_ms + more.constant_ms,
        )

    def _with_carried(
        self, latency: LatencyModel, scheme: Scheme, travels_ms: float
    ) -> LatencyModel:
        """`latency` with `travels_ms` for a token in all exchanges of SP. The first part's queries,
        keys and values are not hidden, nor the last part's output, the same in backward. The time
        of attention that hides the rest is as under CP.
        """
        memory = self.profile.memory
        parts, share = memory.key_value_parts(scheme), 1 + 2 * memory.key_value_share
        num_heads = sum(parts)
        # Of share + 1 numbers a head: queries, keys and values on the way in, outputs back
        hidden = (share * (num_heads - parts[0]) + num_heads - parts[-1]) / (share + 1) / num_heads
        hiding = 1 + (parts[-1] - parts[0]) / num_heads
        return replace(
            latency,
            linear_ms=latency.linear_ms + (1 - hidden) * travels_ms,
            exchange_ms=latency.exchange_ms + hiding * hidden * travels_ms,
        )

    def _with_key_values(self, latency: LatencyModel, scheme: Scheme) -> LatencyModel:
        """`latency` of a group without communication, with the gathers of CP ranks on top, in parts
        of some heads: beside the attention of others all but the first can travel. Attention to
        pieces of sequences has its own overhead.
        """
        cluster = self.cluster
        if cluster is None or scheme.cp == 1:
            return latency
        layers = cluster.shape.num_layers / scheme.pp
        each_ms = layers * cluster.hardware.collective_overhead_ms
        travels_ms = key_values_ms(cluster.shape, cluster.hardware, scheme)
        seen_ms, hidden_ms = self._seen_and_hidden(scheme, travels_ms)
        parts = self._parts_of_parts(scheme)
        # Each part that SP brings is gathered by itself, and nothing hides its first part
        num_seen = _SEEN_EXCHANGES * len(parts)
        starts = KEY_VALUE_EXCHANGES * sum(map(len, parts)) - num_seen
        return replace(
            latency,
            linear_ms=latency.linear_ms + seen_ms,
            hidden_ms=hidden_ms + starts * each_ms / (scheme.cp * _ROW_TOKENS),
            constant_ms=latency.constant_ms + num_seen * each_ms + self._pieces_ms(scheme),
        )

    def _pieces_ms(self, scheme: Scheme) -> float:
        """Overhead of a micro-batch whose attention is to pieces of sequences; 0 where unknown."""
        if self.cluster is None:
            return 0.0
        layers = self.cluster.shape.num_layers / scheme.pp
        return layers * self.cluster.hardware.pieces_overhead_ms

    def _seen_and_hidden(self, scheme: Scheme, travels_ms: float) -> tuple[float, float]:
        """Visible time of keys and values that travel `travels_ms` for a token in all exchanges of
        CP, and the time of attention that hides the rest. Nothing of one part is hidden.

        Attention as long as all that travels is too short for a part that is larger than the one
        before by the difference.
        """
        parts = self._parts_of_parts(scheme)
        num_heads = sum(map(sum, parts))
        # One exchange of three, that of keys for backward, is beside the MLP
        of_first = _SEEN_EXCHANGES / KEY_VALUE_EXCHANGES
        seen = sum(own[0] * (of_first if len(own) > 1 else 1) for own in parts) / num_heads
        hiding = 1 + max(own[-1] - own[0] for own in parts) / num_heads
        return seen * travels_ms, hiding * (1 - seen) * travels_ms

    def _parts_of_parts(self, scheme: Scheme) -> list[list[int]]:
        """Heads of the parts in which CP sends keys and values, of each part that SP brings."""
        parts = self.profile.memory.key_value_parts(scheme)
        if scheme.sp == 1:
            return [parts]
        return [key_value_parts(num_heads, MOST_KEY_VALUE_PARTS) for num_heads in parts]

    @cached_property
    def single_rank(self) -> LatencyModel | None:
        """T of the whole model on one rank, or None where the profile has no <1,PP>.

        That of <1,1> where it was measured; else the cheapest PP times T of <1,PP>, for a
        micro-batch of `_REFERENCE_TOKENS`. Its quadratic part is then at least that of the TP
        schemes, for each device, and T of `_FITTED_TOKENS` stays: attention of a profiled <1,PP>
        was measured on micro-batches shorter than those that SP ranks hold together, from which T
        follows well and its quadratic part does not.
        """
        profile, one = self.profile, Scheme(1, 1)
        if one in profile.latency and one not in profile.assumed:
            return profile.latency[one]
        plain = [(s, latency) for s, latency in profile.latency.items() if s.is_plain]
        found = [latency.scaled(s.pp) for s, latency in plain if s.tp == 1]
        of_tp = [s.tp * latency.quadratic_ms for s, latency in plain if s.tp > 1 and s.pp == 1]
        single = min(found, key=lambda t: t.micro_batch_ms([_REFERENCE_TOKENS]), default=None)
        if single is None or not of_tp:
            return single
        # What attention takes more, `linear_ms` takes less: T of `_FITTED_TOKENS` is the same
        more = max(0.0, min(of_tp) - single.quadratic_ms)
        return replace(
            single,
            quadratic_ms=single.quadratic_ms + more,
            linear_ms=max(0.0, single.linear_ms - more * _FITTED_TOKENS),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Setting of a training run: prices of schemes, devices, the longest sequence in tokens, and
    whether the model runs a scheme.
    """

    costs: Costs
    num_devices: int
    context_length: int
    can_run: CanRun = runs_all
    offloads: bool = False
    """Whether checkpointed layers that are proposed keep what they need in the host's memory."""

    @classmethod
    def of(
        cls, profile: Profile, cluster: Cluster | None, num_devices: int, context_length: int
    ) -> World:
        """The world of a profile, on interconnects that are known or not."""
        return cls(
            costs=Costs(profile, cluster), num_devices=num_devices, context_length=context_length
        )

    @property
    def profile(self) -> Profile:
        """The profile, without prices of other schemes."""
        return self.costs.profile

    @property
    def cluster(self) -> Cluster | None:
        """Cluster that prices pull and push, None where it is not known."""
        return self.costs.cluster

    def max_len_tokens(self, scheme: Scheme) -> int:
        """MaxLen of `scheme`."""
        return self.profile.max_len_tokens(scheme, self.num_devices)

    def has_room(self, scheme: Scheme) -> bool:
        """Whether `scheme` can be here (`Profile.has_room`)."""
        return self.profile.has_room(scheme, self.num_devices)

    @property
    def can_offload(self) -> bool:
        """Whether it is known what it takes to keep something in the host's memory."""
        return self.cluster is not None and self.cluster.hardware.host_rate > 0

    @property
    def measured(self) -> Self:
        """The same without entries that the profile has derived or estimated before."""
        return replace(self, costs=self.costs.measured)

    def on(self, num_devices: int) -> Self:
        """The same with another number of devices."""
        # Prices depend on the number of devices, so none that is known is taken over
        cluster = self.cluster and replace(self.cluster, num_devices=num_devices)
        return replace(self, costs=Costs(self.profile, cluster), num_devices=num_devices)

    def knowing(self, profile: Profile) -> Self:
        """The same with another profile."""
        return replace(self, costs=Costs(profile, self.cluster))

    def linked_by(self, cluster: Cluster | None) -> Self:
        """The same with other interconnects."""
        return replace(self, costs=Costs(self.profile, cluster))
