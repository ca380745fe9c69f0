"""Ranks compare their link plans of a strategy once, before anything is exchanged by them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_hydra.engine.ranks.agreement import gather_rows
from ds_hydra.errors import PlanMismatchError
from ds_hydra.strategy import Strategy
from ds_hydra.zero_link import LinkPlan


def check_link_plans(strategy: Strategy, plans: Sequence[LinkPlan], device: torch.device) -> None:
    """Raise PlanMismatchError on every rank where the parts of the ranks do not fit. Collective
    over all ranks.

    Digests say that all ranks planned from the same model, strategy and nodes; the balance that
    every message that one rank sends is one that another expects.
    """
    mine = [number for plan in plans for number in (plan.digest, plan.traffic_balance)]
    all_ranks = gather_rows(torch.tensor(mine, dtype=torch.int64, device=device)).T.tolist()
    for index, plan in enumerate(plans):
        what = f"{'push' if plan.gradients else 'pull'} of {strategy}"
        digests, balances = all_ranks[2 * index : 2 * index + 2]
        differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if differing:
            raise PlanMismatchError(
                f"the link plan of the {what} has digest {digests[0]:016x} on rank 0 and "
                f"{digests[differing[0]]:016x} on rank {differing[0]} ({len(differing)} of {plan.num_ranks} ranks "
                "differ); nothing was exchanged. Give every rank the same model and configuration"
            )
        if sum(balances) % (1 << 64):
            raise PlanMismatchError(
                f"the ranks' parts of the link plan of the {what} do not fit together although their digests "
                f"agree ({digests[0]:016x}); nothing was exchanged. Run the same version of ds_hydra on every rank"
            )
