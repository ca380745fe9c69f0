"""The link between ZeRO-3 shards and the slices that propagation uses."""

from ds_hydra.zero_link.layout import ParamSpec, Region, Slicing
from ds_hydra.zero_link.messages import Bucket, BucketEntry, LinkPlan, RankBuckets, keep_only
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
    "keep_only",
    "plan_link",
]
