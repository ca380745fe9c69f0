"""`ds-hydra init`: a starting configuration for a model and a cluster, with the reason for every
value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ds_hydra.commands import common
from ds_hydra.errors import HydraConfigError


def init(
    model: Annotated[str, typer.Option(help=common.MODEL_HELP)],
    device: Annotated[
        str,
        typer.Option(*common.HARDWARE, help="A shipped name (a800, h100) or ds_hydra.hardware/1."),
    ],
    devices: common.NumDevices,
    context: common.ContextLength,
    tokens: common.TokensPerIteration = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write the JSON; the reasons go beside it, in OUT.md."),
    ] = None,
    trainer: Annotated[
        bool,
        typer.Option(
            "--trainer", help='For HydraTrainer and TRL: "auto" where TrainingArguments fill in.'
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write a starting configuration that passes `ds-hydra check`, and the reason for every value.

    JSON has no comments, so the reasons go to a file of the same name that ends in .md, or to
    stderr.

    Example: ds-hydra init --model llama2_7b --hardware a800 --devices 16 --context 32768 --out
    ds_config.json
    """
    with common.errors_to_stderr(common.READS_LIKE_DEEPSPEED):
        common.check_folder(out)
        reasons_file = None if out is None else out.with_suffix(".md")
        for path in (out, reasons_file):
            if path is not None and path.exists() and not force:
                raise HydraConfigError(
                    f"{path} exists; name another file with --out, or replace it with --force"
                )
        with common.stdout_to_stderr():
            common.say_loading()
            config, reasons = start_config(model, device, devices, context, tokens, trainer=trainer)
        text = json.dumps(config, indent=2) + "\n"
        table = describe_reasons(f"{model} on {devices} {device}", config, reasons)
        if out is None or reasons_file is None:
            print(text, end="")
            common.log(table)
            return
        try:
            out.write_text(text, encoding="utf-8")
            reasons_file.write_text(table + "\n", encoding="utf-8")
        except OSError as error:
            raise HydraConfigError(f"cannot write {out}: {error.strerror}") from error
        common.log(f"wrote {out} and {reasons_file}")
        # A shipped profile is named in the file; else memory and time are judged by the hardware
        judged_by = "" if "profile" in config["hydra"] else f" --hardware {device}"
        common.log(f"check it: ds-hydra check {out} --model {model} --devices {devices}{judged_by}")


def start_config(
    model: str,
    device: str,
    devices: int,
    context: int,
    tokens: int | None,
    *,
    trainer: bool = False,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The DeepSpeed JSON, and for dotted keys why they have their value.

    The shipped profile of that hardware and model is used if there is one; else the engine measures
    at the start. Schemes checkpoint as many layers as they need, so nothing recomputes all. For a
    `trainer` what TrainingArguments fill in is left to them. Raises HydraConfigError where `check`
    would find a problem.
    """
    from ds_hydra.configs import list_files
    from ds_hydra.strategy.cost_models.analytic import Hardware
    from ds_hydra.strategy.cost_models.decoder import ModelSize
    from ds_hydra.strategy.proposal.program import default_tokens_per_iteration

    Hardware.load(device)  # before anything slow
    shipped = f"{device}_{model}"
    profile = shipped if shipped in list_files("profiles") else None
    hydra: dict[str, Any] = {
        "context_length": context,
        "tokens_per_iteration": tokens or default_tokens_per_iteration(devices, context),
    }
    reasons = {
        "hydra.context_length": "longest sequence that is trained on; longer ones are cut (hydra.over_length)",
        "hydra.tokens_per_iteration": "as asked for"
        if tokens
        else "100,000 for every 64 devices, four sequences of the context at least; the learning rate goes with it",
    }
    if profile is not None:
        hydra["profile"] = profile
        reasons["hydra.profile"] = "measured for this model on this hardware, comes with ds_hydra"
    else:
        reasons["hydra.profile"] = (
            "left out: nothing is shipped for this model and hardware, so every start measures it; "
            "`ds-hydra profile --out profile.json` does it once, then name that file here"
        )
    if device != "cpu":
        hydra["compile_layers"] = True
        reasons["hydra.compile_layers"] = (
            "norms, rotary embedding and activation of a layer in few kernels; a minute of compilation for each layer "
            "kind and TP degree, when it first runs"
        )
    config = {**_deepspeed_part(model, device, reasons), "hydra": hydra}
    if trainer:
        config = _left_to_arguments(config, reasons)
    # After all that can be checked without it: the import takes seconds
    from ds_hydra.engine.checks.config_check import CheckRequest, check_config

    report = check_config(
        CheckRequest(config=config, model=model, num_devices=devices, device=device)
    )
    if report.problems:
        raise HydraConfigError("; ".join(report.problems))
    common.log(f"model: {ModelSize(**report.parameters)}")
    if report.offloaded:
        common.log(report.offloaded)
    return config, reasons


def _deepspeed_part(model: str, device: str, reasons: dict[str, str]) -> dict[str, Any]:
    """The part of the configuration that DeepSpeed reads; adds to `reasons`."""
    from ds_hydra.engine.model.meta_model import load_model_config

    config: dict[str, Any] = {}
    if device != "cpu":
        config["bf16"] = {"enabled": True}
        reasons["bf16.enabled"] = (
            "weights and activations; masters and gradients are fp32 all the same"
        )
    config["gradient_clipping"] = 1.0
    reasons["gradient_clipping"] = "the norm that LLaMA 2 was trained with"
    config["zero_optimization"] = {"stage": 3}
    reasons["zero_optimization.stage"] = "the only stage that works: parameters live fully sharded"
    hidden_size = getattr(load_model_config(model).get_text_config(), "hidden_size", None)
    is_large = isinstance(hidden_size, int) and hidden_size >= 6144
    learning_rate = 1.5e-4 if is_large else 3e-4
    config["optimizer"] = {
        "type": "AdamW",
        "params": {
            "lr": learning_rate,
            "betas": [0.9, 0.95],
            "eps": 1e-5,
            "weight_decay": 0.1,
            "torch_adam": True,
            "fused": True,
        },
    }
    reasons["optimizer.params"] = (
        f"LLaMA 2's pre-training of {'33B and more' if is_large else '7B and 13B'}; fine-tuning wants a lower lr"
    )
    reasons["optimizer.params.torch_adam"] = (
        "torch's fused AdamW: one kernel, and no compiler on the host, which DeepSpeed's own wants at the first start"
    )
    config["scheduler"] = {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 100_000, "warmup_num_steps": 2000, "cos_min_ratio": 0.1},
    }
    reasons["scheduler.params"] = (
        "set total_num_steps to tokens of the run / hydra.tokens_per_iteration"
    )
    return config


def _left_to_arguments(config: dict[str, Any], reasons: dict[str, str]) -> dict[str, Any]:
    """`config` with "auto" where transformers fills in TrainingArguments, and without a scheduler,
    which it makes itself; adds to `reasons`.
    """
    given = config["optimizer"]["params"]
    filled_in = ("lr", "betas", "eps", "weight_decay")
    params = {**given, **dict.fromkeys(filled_in, "auto")}
    changed = {
        **config,
        "gradient_clipping": "auto",
        "optimizer": {**config["optimizer"], "params": params},
    }
    if "bf16" in config:
        changed["bf16"] = {"enabled": "auto"}
        reasons["bf16.enabled"] = "bf16=True of TrainingArguments; " + reasons["bf16.enabled"]
    del changed["scheduler"], reasons["scheduler.params"]
    reasons["gradient_clipping"] = (
        f"max_grad_norm; {config['gradient_clipping']} is {reasons['gradient_clipping']}"
    )
    values = ", ".join(str(given[key]) for key in filled_in)
    reasons["optimizer.params"] = (
        "learning_rate, adam_beta1, adam_beta2, adam_epsilon, weight_decay and lr_scheduler_type of TrainingArguments; "
        f"{values} are {reasons['optimizer.params']}"
    )
    reasons["train_micro_batch_size_per_gpu"] = (
        "DeepSpeed asks for one where it loads a model in parts; hydra.tokens_per_iteration says what an iteration has"
    )
    return {"train_micro_batch_size_per_gpu": "auto", **changed}


def describe_reasons(title: str, config: dict[str, Any], reasons: dict[str, str]) -> str:
    """A table in Markdown: key, value, reason; then the keys of "hydra" that are left at their
    default.
    """
    from ds_hydra.configs.ds_config import find_key
    from ds_hydra.configs.hydra_config import HydraConfig

    lines = [f"# {title}", "", "| key | value | why |", "|---|---|---|"]
    for key, why in reasons.items():
        value = find_key(config, key)
        lines.append(f"| `{key}` | {'' if value is None else f'`{json.dumps(value)}`'} | {why} |")
    lines += [
        "",
        "Keys of `hydra` that are left at their default:",
        "",
        "| key | default | meaning |",
        "|---|---|---|",
    ]
    for name, field in HydraConfig.model_fields.items():
        if f"hydra.{name}" in reasons or hasattr(type(field.default), "model_fields"):
            continue
        meaning = " ".join((field.description or "").split())
        lines.append(f"| `hydra.{name}` | `{json.dumps(field.default)}` | {meaning} |")
    return "\n".join(lines)
