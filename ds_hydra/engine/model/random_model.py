"""A model to measure: random ZeRO-3 shards of any configuration, without optimizer and without
whole parameters.
"""

from __future__ import annotations

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PretrainedConfig

from ds_hydra.engine.model.packing_probe import try_small_copy
from ds_hydra.engine.model.stage_model import StageModel

_SPREAD = 0.02


def build_random_stage_model(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_ranks: int,
    activation_checkpointing: bool = False,
    compile_layers: bool = False,
    tp_sequence_parallel: bool = False,
    simulated_tp_size: int = 1,
) -> StageModel:
    """The stage model of a model whose shards, 1/num_ranks of each parameter, are random; not
    collective.

    Links read `ds_tensor` of a parameter only, so that is all that a parameter gets. Raises
    UnsupportedModelError for what cannot be trained. On the meta device nothing is allocated.
    """
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()
    trial = try_small_copy(model)
    generator = None if device.type == "meta" else torch.Generator(device=device).manual_seed(0)
    for parameter in model.parameters():
        shard_P = torch.ones(-(-parameter.numel() // num_ranks), dtype=dtype, device=device)
        if parameter.dim() > 1:  # norms stay at 1
            shard_P.normal_(0.0, _SPREAD, generator=generator)
        parameter.ds_tensor = shard_P
    stage_model = StageModel(
        model,
        trial,
        activation_checkpointing=activation_checkpointing,
        compile_layers=compile_layers,
        tp_sequence_parallel=tp_sequence_parallel,
        simulated_tp_size=simulated_tp_size,
    )
    stage_model.to_device(device)
    return stage_model
