"""This rank's pull and push of every strategy: link plans, memory of slices, sessions.

Legend: tensors ending in `_P` are flat ZeRO-3 shards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.configs.hydra_config import LinkConfig
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel.groups import GroupPool
from ds_hydra.engine.ranks.agreement import gather_by_hosts, on_all_ranks
from ds_hydra.engine.ranks.hosts import (
    Hosts,
    devices_per_node,
    find_ranks_per_node,
    warn_of_placement,
)
from ds_hydra.engine.telemetry.trace import DeviceClock, Recorder
from ds_hydra.engine.transfer.schedule import Window, plan_transfers
from ds_hydra.engine.transfer.session import LinkCarrier, TransferSession
from ds_hydra.engine.transfer.stage_weights import SlicePool, StageWeights
from ds_hydra.errors import PlanMismatchError
from ds_hydra.sampler.plan import RankPhase
from ds_hydra.strategy import Strategy
from ds_hydra.strategy.schemes.placement import link_groups, slices_key
from ds_hydra.zero_link import LinkPlan, RankBuckets, Relayed, plan_link
from ds_hydra.zero_link.buffers import ExchangeBuffers
from ds_hydra.zero_link.exchange import Link

GRADIENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Values of `LinkConfig.gradient_dtype`."""


@dataclass(frozen=True, slots=True)
class StrategyLink:
    """This rank's link plans for one strategy, or for all that need the same slices."""

    buckets: RankBuckets
    pull: LinkPlan
    push: LinkPlan
    pull_again: LinkPlan | None = None
    """The pull of weights that were pulled before, where they stay on the nodes."""


class StrategyLinks:
    """Pull and push of strategies on this rank. Methods are collective over all ranks where they
    say so.
    """

    def __init__(
        self,
        stage_model: StageModel,
        groups: GroupPool,
        hosts: Hosts,
        config: LinkConfig,
        device: torch.device,
    ):
        """Collective over all ranks: creates the groups of pull and push."""
        self.stage_model = stage_model
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.hosts, self._device = hosts, device
        if self.rank == 0 and config.devices_per_node is None:
            warn_of_placement(hosts.of_rank)
        self.devices_per_node = devices_per_node(config, hosts.of_rank)
        self.ranks_per_node = find_ranks_per_node(config, hosts.of_rank)
        """Ranks of a node; None where no rank relays data from other nodes."""
        keys = link_groups(self.num_ranks, self.ranks_per_node)
        groups.create(keys)
        # A group each: one rank may push while another has not ended its pull.
        mine = {
            purpose: groups.get(purpose, ranks) for purpose, ranks in keys if self.rank in ranks
        }
        self._dtype: torch.dtype = stage_model.params[0].ds_tensor.dtype  # type: ignore[attr-defined]
        self._gradient_dtype = GRADIENT_DTYPES[config.gradient_dtype]
        self.buffers = ExchangeBuffers(device)
        self.pool = SlicePool(device)
        self.pull_link = Link(
            mine["pull"], device, buffers=self.buffers, node_group=mine.get("pull_node")
        )
        self.push_link = Link(
            mine["push"], device, self._gradient_dtype, self.buffers, mine.get("push_node")
        )
        self.recorder = Recorder(DeviceClock(device))
        self.overlap = config.overlap
        self._links: dict[Hashable, StrategyLink] = {}
        self._kept: StageWeights | None = None
        """Weights of the last passes, if these have not failed, and their key."""
        self._key_of_kept: Hashable = None

    def close(self) -> None:
        """Let go of the last iteration's weights; not collective."""
        self._kept = None

    def link_for(self, strategy: Strategy) -> StrategyLink:
        """Link plans of `strategy`; the first time collective, because ranks compare them."""
        # Planned phases make up many strategies that need the same slices: one link serves them.
        key = slices_key(strategy)
        if key not in self._links:
            rank_buckets = self.stage_model.strategy_buckets(strategy, self.num_ranks)

            def plan(*, gradients: bool = False, relayed: Relayed = Relayed.LEAVES) -> LinkPlan:
                return plan_link(
                    self.stage_model.specs,
                    rank_buckets,
                    self.rank,
                    gradients=gradients,
                    ranks_per_node=self.ranks_per_node,
                    # Rounds of gathered layers come again and again, each by itself.
                    independent_rounds=strategy.gathers,
                    relayed=relayed,
                )

            stays = strategy.keeps_on_nodes
            link = StrategyLink(
                buckets=rank_buckets[self.rank],
                pull=plan(relayed=Relayed.STAYS if stays else Relayed.LEAVES),
                push=plan(gradients=True),
                pull_again=plan(relayed=Relayed.IS_THERE) if stays else None,
            )
            # Before anything is exchanged: ranks with different plans would hang, not fail.
            plans = [link.pull, link.push] + ([link.pull_again] if link.pull_again else [])
            check_link_plans(strategy, plans, self._device)
            self._links[key] = link
        return self._links[key]

    def open(
        self,
        phases: Sequence[RankPhase],
        *,
        training: bool,
        grads_P: Sequence[Tensor] | None,
    ) -> TransferSession:
        """The session that fills and empties the slices on which `phases` run, which all need the
        same, and pushes into `grads_P`; the first time collective, as `link_for` is.
        """
        # No round is under way here, so what failed ones left can go.
        self.buffers.forget_failed()
        self.pull_link.forget_relayed()
        self.push_link.forget_relayed()
        strategy = phases[0].plan.strategy
        link = self.link_for(strategy)
        window = self.stage_model.gather_window() if strategy.gathers else Window()
        schedule = plan_transfers(
            window,
            len(link.buckets),
            len(link.pull.rounds),
            # Rounds are those of the pipeline with the most micro-batches, on every rank.
            [max(len(p.micro_batches) for p in phase.plan.pipelines) for phase in phases],
            training=training,
            pushes=grads_P is not None,
        )
        weights = self._weights(link.buckets, window, training=training)
        carrier = LinkCarrier(
            (self.pull_link, link.pull),
            (self.push_link, link.push),
            self.shards_P(),
            grads_P,
            weights,
            pull_again=link.pull_again,
        )
        return TransferSession(self.recorder, schedule, carrier, weights, overlap=self.overlap)

    def keep_for_reuse(self, weights: StageWeights) -> None:
        """All passes on `weights` are over, and nothing of them is under way."""
        self._kept = weights

    def _weights(self, buckets: RankBuckets, window: Window, *, training: bool) -> StageWeights:
        """Weights of an iteration: the last one's where it needed the same and succeeded."""
        key = id(buckets), training  # links keep buckets alive, and say which are gathered
        known, self._kept = self._kept, None
        if known is not None and self._key_of_kept == key:
            return known.begin_again()
        del known  # before memory changes hands
        self._key_of_kept = key
        return StageWeights(
            self.stage_model.specs,
            buckets,
            self.pool,
            self._dtype,
            training=training,
            # An idle rank takes part in the rounds of gathered layers, without slots of its own.
            slot_of=window.slot_of if buckets else {},
        )

    def shards_P(self) -> list[Tensor]:
        """This rank's ZeRO-3 shards."""
        return [p.ds_tensor.detach() for p in self.stage_model.params]  # type: ignore[attr-defined]


def check_link_plans(strategy: Strategy, plans: Sequence[LinkPlan], device: torch.device) -> None:
    """Raise PlanMismatchError on every rank where the parts of the ranks do not fit. Collective
    over all ranks.

    Digests say that all ranks planned from the same model, strategy and nodes; the balance that
    every message that one rank sends is one that another expects.
    """
    mine = [number for plan in plans for number in (plan.digest, plan.traffic_balance)]
    all_ranks = gather_by_hosts(torch.tensor(mine, dtype=torch.int64), device).T.tolist()
    for index, plan in enumerate(plans):
        what = f"{'push' if plan.gradients else 'pull'} of {strategy}"
        digests, balances = all_ranks[2 * index : 2 * index + 2]
        differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if differing:
            raise on_all_ranks(
                PlanMismatchError(
                    f"the link plan of the {what} has digest {digests[0]:016x} on rank 0 and "
                    f"{digests[differing[0]]:016x} on rank {differing[0]} ({len(differing)} of {plan.num_ranks} ranks "
                    "differ); nothing was exchanged. Give every rank the same model and configuration"
                )
            )
        if sum(balances) % (1 << 64):
            raise on_all_ranks(
                PlanMismatchError(
                    f"the ranks' parts of the link plan of the {what} do not fit together although their digests "
                    f"agree ({digests[0]:016x}); nothing was exchanged. Run the same version of ds_hydra on every rank"
                )
            )
