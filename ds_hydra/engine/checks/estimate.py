"""A profile of a model and a device that nobody has measured, by FLOPs and bytes."""

from __future__ import annotations

from transformers import PretrainedConfig

from ds_hydra.configs import HydraConfig
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.profiling.profile_document import count_parameters, state_memory
from ds_hydra.model_config import all_fields
from ds_hydra.strategy import Profile
from ds_hydra.strategy.cost_models.analytic import Hardware, predict_profile
from ds_hydra.strategy.cost_models.decoder import read_decoder
from ds_hydra.strategy.proposal.estimate import describe_model, expert_parallel_schemes
from ds_hydra.strategy.schemes.enumeration import power_of_two_schemes
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION


def estimate_profile(
    stage_model: StageModel, hardware: Hardware, num_devices: int, hydra: HydraConfig, *, name: str
) -> Profile:
    """A profile that nobody has measured: roofline of `hardware`, states counted from the dtypes in
    use.

    Recomputed layers keep their input, 2 TP bytes (2 with `hydra.tp_sequence_parallel`) for each
    token and hidden unit of 1/TP of a micro-batch, and one of L layers is whole at a time; their
    forward counts twice in T.
    """
    config: PretrainedConfig = stage_model.config
    fields = {**all_fields(config), "vocab_size": stage_model.vocab_size}
    shape, heads = describe_model(fields, config.model_type)
    wanted = (
        *power_of_two_schemes(num_devices),
        *expert_parallel_schemes(shape, heads, num_devices),
    )
    schemes = [scheme for scheme in wanted if stage_model.can_run(scheme)]
    layers = stage_model.num_layers

    def activation_bytes(tp: int) -> float:
        kept = shape.activation_bytes(tp)
        inputs = 2.0 if hydra.tp_sequence_parallel else 2.0 * tp
        return inputs + kept / layers if hydra.activation_checkpointing else kept

    document = predict_profile(
        shape,
        hardware,
        schemes,
        name=name,
        memory={
            "activation_bytes_per_token_per_layer_per_hidden": {
                str(tp): activation_bytes(tp) for tp in {scheme.tp for scheme in schemes}
            },
            **state_memory(stage_model),
        },
        context_length=hydra.context_length,
        float8=hydra.float8 in ("tensorwise", "rowwise"),
    )
    document["model"]["parameters"] = count_parameters(stage_model).to_json()
    document["model"]["unpriced"] = list(read_decoder(fields, config.model_type).unpriced)
    document["tp_sequence_parallel"] = hydra.tp_sequence_parallel
    document["float8"] = hydra.float8
    document["activation_checkpointing"] = hydra.activation_checkpointing
    if hydra.activation_checkpointing:
        for entry in document["schemes"]:
            for term in ("quadratic_ms", "linear_ms", "constant_ms"):
                entry[term] *= 1 + FORWARD_FRACTION
    return Profile.from_json(document)
