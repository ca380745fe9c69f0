"""What uneven stages and checkpointed layers change in the time and memory of a pipeline, in layers
of a stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hydra.strategy.schemes.scheme import Scheme

FORWARD_FRACTION = 1 / 3
"""Part of forward and backward that is the forward, which runs again for a checkpointed layer:
backward takes two.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """What one stage holds in the worst moment of 1F1B."""

    num_layers: int
    num_checkpointed: int
    micro_batches_in_flight: int
    """Micro-batches whose forward is done and whose backward is not."""
    is_last: bool

    @property
    def work(self) -> float:
        """Time of one micro-batch in forwards and backwards of a layer; a checkpointed one also
        runs forward again.
        """
        return self.num_layers + self.num_checkpointed * FORWARD_FRACTION


def stage_layers(scheme: Scheme, num_layers: int) -> list[StageLayers]:
    """The stages of `scheme` on a model of `num_layers`; raises HydraConfigError where they do not
    fit.

    >>> [stage.work for stage in stage_layers(Scheme(1, 2, stages=(5, 3), ckpt=6), 8)]
    [6.666666666666666, 3.3333333333333335]
    """
    scheme.check_layers(num_layers)
    layers = [scheme.stage_layers(num_layers, stage) for stage in range(scheme.pp)]
    return [
        StageLayers(
            num_layers=len(own),
            num_checkpointed=len(range(own.start, min(own.stop, scheme.ckpt))),
            micro_batches_in_flight=scheme.pp - stage,
            is_last=stage == scheme.pp - 1,
        )
        for stage, own in enumerate(layers)
    ]


def slowest_stage_ratio(scheme: Scheme, num_layers: int) -> float:
    """T of `scheme` over T of the same degrees without options, by the layers of the slowest stage.

    T is that of a stage of ceil(L / PP) layers; its share of embedding and head grows with the
    layers as T does.

    >>> [slowest_stage_ratio(Scheme(1, 2, **o), 8) for o in ({"stages": (5, 3)}, {"ckpt": 4})]
    [1.25, 1.3333333333333333]
    """
    work = max(stage.work for stage in stage_layers(scheme, num_layers))
    return work / -(-num_layers // scheme.pp)
