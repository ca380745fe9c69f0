"""The link between ZeRO-3 shards and the slices that propagation uses."""

from ds_hydra.zero_link.layout import (
    Bucket,
    BucketEntry,
    LinkPlan,
    ParamSpec,
    RankBuckets,
    Region,
    Slicing,
)
from ds_hydra.zero_link.plan import Relayed, plan_link

__all__ = [
    "Bucket",
    "BucketEntry",
    "LinkPlan",
    "ParamSpec",
    "RankBuckets",
    "Region",
    "Relayed",
    "Slicing",
    "plan_link",
]
