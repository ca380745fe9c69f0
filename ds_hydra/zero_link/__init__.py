"""The link between ZeRO-3 shards and the slices that propagation uses."""

from ds_hydra.zero_link.layout import ParamSpec, Region, Slicing
from ds_hydra.zero_link.plan import Bucket, LinkPlan, RankBuckets, SliceRef, plan_link

__all__ = ["Bucket", "LinkPlan", "ParamSpec", "RankBuckets", "Region", "SliceRef", "Slicing", "plan_link"]
