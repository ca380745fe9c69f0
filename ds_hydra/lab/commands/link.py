"""`ds-hydra link`: transfers of a strategy between ranks and nodes, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ds_hydra.commands import common
from ds_hydra.configs.files import MAX_DEVICES, MAX_PAIRED_DEVICES, find_file
from ds_hydra.errors import HydraConfigError

if TYPE_CHECKING:
    from ds_hydra.lab.traffic import LinkAccounts, LinkTraffic
    from ds_hydra.strategy.cost_models.topology import Interconnects


ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


def link(
    strategy: Annotated[
        str, typer.Option(help="Pipelines as count x <TP,PP>, e.g. '1x<2,1> + 2x<1,1>'.")
    ],
    model: Annotated[
        str,
        typer.Option(help=f"{common.MODEL_HELP} No weights are read."),
    ],
    devices: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_PAIRED_DEVICES, help="Ranks; those outside the strategy own shards only."
        ),
    ],
    devices_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_DEVICES,
            help="Consecutive ranks of one node; the topology's if not given.",
        ),
    ] = None,
    topology: Annotated[
        str,
        typer.Option(
            help="Latency and bandwidth: a ds_hydra.topology/1 or ds_hydra.hardware/1 file, or the name of shipped "
            "hardware (a100, a800, cpu, h100, h200)."
        ),
    ] = "a800",
    dtype: Annotated[
        common.DType, typer.Option(help="Type in which parameters are pulled.")
    ] = "bf16",
    gradient_dtype: Annotated[
        Literal["bf16", "fp32"], typer.Option(help="Type in which gradients are sent.")
    ] = "bf16",
    as_json: common.AsJson = False,
) -> None:
    """Show what pull and push of a strategy send between ranks and nodes, and how long that should
    take.

    Example: ds-hydra link --strategy "1x<2,1> + 2x<1,1>" --model llama2_7b --devices 4
    --devices-per-node 2
    """
    with common.errors_to_stderr(common.MAKES_THE_MODEL):
        document = _account(
            strategy,
            model,
            devices,
            devices_per_node,
            topology,
            {"pull": ITEMSIZE[dtype], "push": ITEMSIZE[gradient_dtype]},
        )
    common.print_json(document) if as_json else print(_describe(document))


def _account(
    text: str,
    model: str,
    num_devices: int,
    devices_per_node: int | None,
    topology: str,
    itemsize: dict[str, int],
) -> dict[str, Any]:
    from ds_hydra.strategy.schemes.scheme import Strategy

    strategy = Strategy.parse(text)
    if strategy.num_devices > num_devices:
        raise HydraConfigError(
            f"{strategy} needs {strategy.num_devices} devices, --devices is {num_devices}; "
            f"use --devices {strategy.num_devices} or more"
        )
    ranks_per_node, interconnects, name = _read_interconnects(
        topology, num_devices, devices_per_node
    )
    common.say_loading()
    from ds_hydra.engine.model.meta_model import load_stage_model
    from ds_hydra.engine.model.scheme_support import check_scheme
    from ds_hydra.engine.profiling.profile_document import count_parameters
    from ds_hydra.lab.traffic import LinkAccounts
    from ds_hydra.zero_link.plan import plan_link

    stage_model = load_stage_model(model)
    for scheme in set(strategy.schemes):
        check_scheme(stage_model, scheme)
    asked = stage_model.strategy_buckets(strategy, num_devices)
    specs = stage_model.specs
    document: dict[str, Any] = {
        "strategy": str(strategy),
        "gathers": strategy.gathers,
        "on_nodes": strategy.keeps_on_nodes,
        "model": model,
        "num_devices": num_devices,
        "devices_per_node": ranks_per_node,
        "topology": name,
        "parameters": sum(spec.numel for spec in specs),
        "model_size": count_parameters(stage_model).to_json(),
        "rounds": max(map(len, asked)),
    }
    for direction, size in itemsize.items():
        gradients = direction == "push"
        accounts = LinkAccounts(specs, asked, ranks_per_node, gradients=gradients)
        plan = plan_link(specs, asked, 0, gradients=gradients, ranks_per_node=ranks_per_node)
        document[direction] = {
            "bytes_per_element": size,
            "digest": f"{plan.digest:016x}",
            "special_cases": [
                {
                    "is": case.describe(gradients),
                    "ranks": list(case.ranks),
                    "rounds": case.num_rounds,
                }
                for case in accounts.special_cases()
            ],
            "least_bytes_across_nodes": accounts.least_across_nodes() * size,
            "direct": _routes(accounts, accounts.direct(interconnects, size), size),
            "node_aware": _routes(accounts, accounts.node_aware(interconnects, size), size),
        }
    return document


def _routes(accounts: LinkAccounts, traffic: LinkTraffic, size: int) -> dict[str, Any]:
    """Bytes of one kind of routes, in the direction in which they travel."""
    pairs = (traffic.pairs.T if traffic.gradients else traffic.pairs) * size
    across = traffic.across_nodes(accounts.nodes) * size
    across = across.T if traffic.gradients else across
    assert traffic.seconds is not None
    return {
        "predicted_ms": traffic.seconds * 1e3,
        "total_bytes": int(pairs.sum()),
        "bytes_across_nodes": int(across.sum() - across.trace()),
        "sent_bytes": pairs.sum(axis=1).tolist(),
        "received_bytes": pairs.sum(axis=0).tolist(),
        "local_bytes": (traffic.local * size).tolist(),
        "pair_bytes": [
            [int(source), int(target), int(pairs[source, target])]
            for source, target in zip(*pairs.nonzero())
        ],
        "node_bytes": across.tolist(),
    }


def _read_interconnects(
    topology: str, num_devices: int, per_node: int | None
) -> tuple[int, Interconnects, str]:
    """Devices of a node, latency and bandwidth between all of them, and the name of their
    source.
    """
    import numpy as np

    from ds_hydra.configs.files import read_json_object, read_number, read_object
    from ds_hydra.strategy.cost_models.analytic import HARDWARE_SCHEMA, Hardware
    from ds_hydra.strategy.cost_models.topology import TOPOLOGY_SCHEMA, Interconnects, Topology

    path = find_file("hardware", topology)
    document = read_json_object(path)
    if document.get("schema") == TOPOLOGY_SCHEMA:
        cluster = Topology.from_json(document, source=str(path))
        if cluster.num_devices != num_devices:
            raise HydraConfigError(
                f"{path} has {cluster.num_devices} devices, --devices is {num_devices}; "
                f"use --devices {cluster.num_devices} or another --topology"
            )
        sizes = {node.num_devices for node in cluster.nodes}
        if len(sizes) > 1 and per_node is None:
            raise HydraConfigError(
                f"{path} has nodes of {', '.join(map(str, sorted(sizes)))} devices; routes know nodes of one size: "
                f"say which with --devices-per-node, e.g. {min(sizes)}"
            )
        return per_node or sizes.pop(), cluster.interconnects(), str(path)
    if document.get("schema") != HARDWARE_SCHEMA:
        raise HydraConfigError(
            f"{path}: schema is {document.get('schema')!r}, expected {TOPOLOGY_SCHEMA!r} or {HARDWARE_SCHEMA!r}"
        )
    hardware = Hardware.from_json(document, source=str(path))
    try:
        latency = read_object(document, "latency_s")
        intra, inter = (
            read_number(latency, name, least=0) for name in ("intra_node", "inter_node")
        )
    except (KeyError, HydraConfigError) as error:
        raise HydraConfigError(
            f"{path}: latency_s needs the seconds intra_node and inter_node, e.g. 1e-5 and 2e-5"
        ) from error
    per_node = per_node or hardware.devices_per_node
    node = np.arange(num_devices) // per_node
    is_inside = node[:, None] == node[None, :]
    interconnects = Interconnects(
        latency_s=np.where(is_inside, intra, inter),
        bytes_per_s=np.where(is_inside, hardware.intra_node_rate, hardware.inter_node_rate),
    )
    return per_node, interconnects, hardware.name


def _describe(document: dict[str, Any]) -> str:
    from ds_hydra.strategy.cost_models.decoder import ModelSize

    num_devices, per_node = document["num_devices"], document["devices_per_node"]
    num_nodes = -(-num_devices // per_node)
    lines = [
        f"{document['strategy']} of {document['model']} ({ModelSize(**document['model_size'])}) on "
        f"{num_devices} devices in {num_nodes} node{'s' * (num_nodes > 1)}, {document['rounds']} rounds; "
        f"times of {document['topology']}"
    ]
    if document["gathers"]:
        lines += [
            "layers are gathered: the pull below runs twice, the push once, for every micro-batch"
            + ("; what is relayed to a node crosses in the first pull alone" * document["on_nodes"])
        ]
    for direction in ("pull", "push"):
        lines += ["", *_describe_direction(direction, document[direction], num_devices, per_node)]
    return "\n".join(lines)


def _describe_direction(
    name: str, part: dict[str, Any], num_devices: int, per_node: int
) -> list[str]:
    lines = [f"{name}, {part['bytes_per_element']} bytes per element, digest {part['digest']}"]
    lines += [
        f"  {case['is']}: ranks {_ranks(case['ranks'])}, {case['rounds']} rounds"
        for case in part["special_cases"][:8]
    ]
    if len(part["special_cases"]) > 8:
        lines.append(f"  and {len(part['special_cases']) - 8} more groups (--json lists them)")
    kinds = ("direct", "node_aware") if num_devices > per_node else ("direct",)
    lines.append(f"  {'routes':<12} {'total':>12} {'across nodes':>14} {'predicted':>12}")
    for kind in kinds:
        routes = part[kind]
        lines.append(
            f"  {kind.replace('_', '-'):<12} {_size(routes['total_bytes']):>12} "
            f"{_size(routes['bytes_across_nodes']):>14} {routes['predicted_ms']:>9.2f} ms"
        )
    if num_devices > per_node:
        lines.append(
            f"  {'lower bound':<12} {'':>12} {_size(part['least_bytes_across_nodes']):>14}"
        )
    used = part[kinds[-1]]
    rows = list(zip(used["sent_bytes"], used["received_bytes"], used["local_bytes"]))
    if num_devices <= 16:
        lines.append(f"  {'rank':<12} {'sends':>12} {'receives':>14} {'copies':>12}")
        lines += [
            f"  {rank:<12} {_size(sent):>12} {_size(received):>14} {_size(local):>12}"
            for rank, (sent, received, local) in enumerate(rows)
        ]
    else:
        for what, column in zip(("sends", "receives", "copies"), zip(*rows)):
            low, high = min(column), max(column)
            lines.append(
                f"  each rank {what} {_size(low)} (rank {column.index(low)}) to {_size(high)} "
                f"(rank {column.index(high)})"
            )
    return lines


def _ranks(ranks: list[int]) -> str:
    """All ranks of a small group, the ends of a large one."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))} ... {ranks[-1]} ({len(ranks)})"


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    raise AssertionError
