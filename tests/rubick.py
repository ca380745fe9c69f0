"""The measured iterations of Rubick as setups: which arguments of the originals' predictor mean
what.
"""

from __future__ import annotations

from typing import Any

from shared_data import shared_json, shared_rows

from ds_hydra.lab.whole_iteration import (
    IterationModel,
    IterationSetup,
    MeasuredIteration,
    predict_iteration,
)

AUTHORS_MEAN_ERROR = {"vit": 3.36, "roberta": 4.14, "bert": 5.06, "t5": 4.11, "gpt2": 3.33}
"""Percent over all validation points, re-run of the originals' notebook (README of the data)."""
INTER_NODE = 20.0
"""Bandwidth between nodes in GB/s, a literal in the originals' code."""


def author_model(model: str) -> dict[str, Any]:
    return shared_json("rubick/author_predictions.json")["models"][model]


def author_parameters(model: str) -> IterationModel:
    data = author_model(model)
    p = data["fitted_params" if data["params_used"] == "fit" else "stored_history_params"]
    return IterationModel(
        bwd=p["k_bwd"],
        sync=p["k_sync"],
        opt=p["k_opt"],
        opt_offload=p["k_os_offload"],
        const_ms=p["k_const"],
        off_ms=p["k_off"],
        swap_ms=p["k_swap"],
    )


def data_parallel_setup(model: str, forward_ms: float, gpus: int, **more: Any) -> IterationSetup:
    data = author_model(model)
    return IterationSetup(
        forward_ms=forward_ms,
        params_mi=data["P_Mi"],
        dp=gpus,
        bandwidth_dp=data["env_bandwidth"]["B_nvlink"],
        bandwidth_host=data["env_bandwidth"]["B_pcie"],
        **more,
    )


def setup_of_call(model: str, function: str, args: dict[str, Any]) -> IterationSetup:
    """The setup that a recorded call of the originals' predictor describes."""
    if function == "throughput":
        return data_parallel_setup(
            model,
            args["forward_time_ms"],
            args["num_gpu"],
            is_sharded=args["zero_type"] == 2,
            is_offloaded=args["zero_type"] == 1,
            threads_per_gpu=args["num_threads_per_gpu"],
            accumulation_steps=args["alpha_b"],
            forward_passes=args["alpha_f"] / args["alpha_b"],
        )
    nvlink = author_model(model)["env_bandwidth"]["B_nvlink"]
    dp_inside = args["gpus_per_node"] > args["tp"] and args["pp"] == args["nodes"]
    return IterationSetup(
        forward_ms=args["forward_time_ms"],
        params_mi=args["P_Mi"],
        dp=args["dp"],
        tp=args["tp"],
        pp=args["pp"],
        batch=args["global_batch"],
        hidden_elements=args["s_h"],
        num_layers=args["layers"],
        bandwidth_dp=nvlink if dp_inside else INTER_NODE,
        bandwidth_tp=nvlink,
        bandwidth_pp=INTER_NODE,
    )


def validation_points(model: str) -> list[tuple[str, IterationSetup, float, float]]:
    """(group, setup, measured ms, the originals' prediction in ms) of every validation point."""
    return [
        (p["plan_label"], setup_of_call(model, p["fn"], p["args"]), p["actual_ms"], p["pred_ms"])
        for p in author_model(model)["validation_points"]
    ]


def fit_points(model: str) -> list[MeasuredIteration]:
    """The points that the originals fit, with the phases they recorded."""
    return [
        MeasuredIteration(
            setup=data_parallel_setup(
                model,
                float(row["forward_input_ms"]),
                int(row["gpus"]),
                is_sharded=row["zero_stage"] == "2",
                is_offloaded=row["offload"] == "optimizer_cpu",
                threads_per_gpu=float(row["cpu_threads_per_gpu"]),
            ),
            iteration_ms=float(row["iter_time_ms"]),
            backward_and_sync_ms=float(row["bwd_plus_sync_ms"]),
            optimizer_ms=float(row["optimizer_ms"]),
        )
        for row in shared_rows(f"rubick/{model}.csv")
        if row["source"] == "fit_profile"
    ]


def replay(model: str) -> float:
    """Largest relative difference between our prediction and theirs, with their parameters."""
    parameters = author_parameters(model)
    return max(
        abs(predict_iteration(parameters, setup).total_ms / predicted - 1)
        for _, setup, _, predicted in validation_points(model)
    )
