"""Resharding of ZeRO-3 shards of another number of ranks: one rank of this world reads its part out
of all files of the old one.

[Note: ZeRO-3 shards on disk]
The optimizer's parameters form sub-groups. Rank r of N keeps of each parameter of n elements the
flat range [r P, (r + 1) P) with P = ceil(n / N), the last one padded with zeros, and concatenates
the ranges of a sub-group into one tensor: the fp32 weights, and each of Adam's moments.
`param_shapes` in the model files names the parameters of every sub-group in that order. Which
parameters share a sub-group depends on N (its size is counted in elements of a shard), so shards
are matched by parameter name.

Legend: `_P` flat shards of one rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hydra.engine.checkpointing.files import read_tensors
from ds_hydra.errors import CheckpointError

SubGroups = Sequence[Mapping[str, Sequence[int]]]
"""Shapes by parameter name, in the order of the flat tensors, for every sub-group."""

_FP32, _OPTIMIZER, _STATE = "fp32_flat_groups", "optimizer_state_dict", "state"


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Places of the parameters in the flat tensors of one rank of `world_size`."""

    world_size: int
    place: Mapping[str, tuple[int, int, int]]
    """Name -> (sub-group, offset in its flat tensor, number of elements of the whole parameter)."""
    group_numel: tuple[int, ...]
    """Length of the flat tensor of every sub-group."""

    @classmethod
    def build(cls, groups: SubGroups, world_size: int) -> ShardLayout:
        """The layout of the sub-groups `groups`."""
        place, group_numel = {}, []
        for index, shapes in enumerate(groups):
            offset = 0
            for name, shape in shapes.items():
                numel = math.prod(shape)
                place[name] = (index, offset, numel)
                # Every parameter is padded by itself, not the flat tensor as a whole
                offset += shard_numel(numel, world_size)
            group_numel.append(offset)
        return cls(world_size, place, tuple(group_numel))


@dataclass(frozen=True, slots=True)
class ShardMove:
    """`numel` elements of the old rank's flat tensor `source` go to the new rank's flat tensor
    `target`.
    """

    source: int
    source_offset: int
    target: int
    target_offset: int
    numel: int


def shard_numel(numel: int, world_size: int) -> int:
    """Elements of a parameter that each rank holds, padding included."""
    return -(-numel // world_size)


def overlap(numel: int, old: tuple[int, int], new: tuple[int, int]) -> tuple[int, int]:
    """Flat range of a parameter that old (rank, world size) and new (rank, world size) both hold;
    may be empty.

    >>> overlap(10, (1, 2), (0, 4)), overlap(10, (1, 2), (2, 4))
    ((5, 3), (6, 9))
    """
    old_numel, new_numel = shard_numel(numel, old[1]), shard_numel(numel, new[1])
    begin = max(old[0] * old_numel, new[0] * new_numel)
    # Never into the padding, which belongs to no element
    return begin, min((old[0] + 1) * old_numel, (new[0] + 1) * new_numel, numel)


def shard_moves(
    old: ShardLayout, old_rank: int, new: ShardLayout, new_rank: int
) -> Iterator[ShardMove]:
    """Moves of elements from the file of `old_rank` to `new_rank`."""
    for name, (target, target_begin, numel) in new.place.items():
        source, source_begin, _ = old.place[name]
        begin, end = overlap(numel, (old_rank, old.world_size), (new_rank, new.world_size))
        if begin < end:
            yield ShardMove(
                source=source,
                # `begin` counts in the parameter, offsets from where a rank's range of it begins
                source_offset=source_begin + begin - old_rank * shard_numel(numel, old.world_size),
                target=target,
                target_offset=target_begin + begin - new_rank * shard_numel(numel, new.world_size),
                numel=end - begin,
            )


def _optimizer_file(folder: Path, rank: int) -> Path:
    """The file with the optimizer shards of `rank`, whatever the precision it was trained in."""
    names = [f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for prefix in ("", "bf16_")]
    # Where neither is there, the name that an error shall mention
    return next((folder / name for name in names if (folder / name).exists()), folder / names[0])


def model_file(folder: Path, rank: int) -> Path:
    """The file with everything else that `rank` saved."""
    return folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def common_model_file(folder: Path, rank: int) -> Path:
    """Rank 0's file, whose common part is equal for all ranks; the own one on storage of another
    node.
    """
    first = model_file(folder, 0)
    return first if first.exists() else model_file(folder, rank)


def read_model_states(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """The model file of `rank` as if `world_size` ranks had saved it."""
    path = common_model_file(folder, rank)
    common: dict[str, Any] = read_tensors(path)
    old_world = common["dp_world_size"]
    if old_world == world_size:
        own = model_file(folder, rank)
        return common if path == own else read_tensors(own)
    shapes = common.get("frozen_param_shapes") or {}
    # Frozen parameters are in tensors of their own: groups of one
    groups = [{name: shape} for name, shape in shapes.items()]
    old, new = ShardLayout.build(groups, old_world), ShardLayout.build(groups, world_size)
    fragments = {
        name: torch.zeros(numel, dtype=common["frozen_param_fragments"][name].dtype)
        for name, numel in zip(shapes, new.group_numel, strict=True)
    }
    names = list(shapes)
    for old_rank in range(old_world if fragments else 0):
        saved = read_tensors(model_file(folder, old_rank), mmap=True)["frozen_param_fragments"]
        for move in shard_moves(old, old_rank, new, rank):
            name = names[move.source]
            _copy(move, saved[name].flatten(), fragments[name])
    return {**common, "dp_world_size": world_size, "frozen_param_fragments": fragments or None}


def read_optimizer_states(
    folder: Path,
    old_groups: SubGroups,
    old_world: int,
    new_groups: SubGroups,
    rank: int,
    world_size: int,
) -> dict[str, Any]:
    """The optimizer file of `rank` as if `world_size` ranks had saved it, one old file in memory
    after the other.

    Raises CheckpointError where the checkpoint is one of another model, or holds a state that is
    neither elementwise nor one value for all.
    """
    _check_same_model(folder, old_groups, new_groups)
    # Equal ranks alone are not enough: another sub_group_size groups parameters anew
    if old_world == world_size and [list(g) for g in old_groups] == [list(g) for g in new_groups]:
        states: dict[str, Any] = read_tensors(_optimizer_file(folder, rank))
        return states
    old, new = ShardLayout.build(old_groups, old_world), ShardLayout.build(new_groups, world_size)
    # What is equal on all ranks (step count, learning rate, loss scale) comes from rank 0.
    result = dict(read_tensors(_optimizer_file(folder, 0), mmap=True))
    zero = dict(result[_OPTIMIZER])
    base = dict(zero[_OPTIMIZER])
    first_old: dict[int, int] = {}
    for name, (target, _, _) in new.place.items():
        # Scalars, such as step counts, go over from the first of its old sub-groups
        first_old.setdefault(target, old.place[name][0])
    # Zeros: the padding at each shard's end stays as DeepSpeed has it
    zero[_FP32] = [torch.zeros(n, dtype=zero[_FP32][0].dtype) for n in new.group_numel]
    base[_STATE] = {
        group: {
            key: _renewed(key, value, old.group_numel[first_old[group]], numel)
            for key, value in base[_STATE][first_old[group]].items()
        }
        for group, numel in enumerate(new.group_numel)
        if first_old.get(group) in base[_STATE]
    }
    base["param_groups"] = _renumbered(base["param_groups"], old_groups, new_groups)
    for old_rank in range(old_world):
        saved = read_tensors(_optimizer_file(folder, old_rank), mmap=True)[_OPTIMIZER]
        # Before any copy: offsets of another layout would read other parameters' elements
        _check_lengths(_optimizer_file(folder, old_rank), saved[_FP32], old.group_numel)
        for move in shard_moves(old, old_rank, new, rank):
            _copy(move, saved[_FP32][move.source], zero[_FP32][move.target])
            for key, target in base[_STATE].get(move.target, {}).items():
                if _is_elementwise(target):
                    _copy(move, saved[_OPTIMIZER][_STATE][move.source][key], target)
    zero[_OPTIMIZER] = base
    result[_OPTIMIZER] = zero
    return result


def _is_elementwise(value: Any) -> bool:
    """Whether an optimizer state has one value per element of a flat tensor."""
    return isinstance(value, Tensor) and value.dim() == 1


def _renewed(key: str, value: Any, old_numel: int, new_numel: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        # A step count that sub-groups shared would be counted up by each of them
        return value.clone()
    if value.dim() != 1 or value.numel() != old_numel:
        raise CheckpointError(
            f"the optimizer's state {key!r} has shape {tuple(value.shape)} for {old_numel} elements of a shard, "
            "which cannot be cut for another number of ranks; resume on as many ranks as have saved"
        )
    return torch.zeros(new_numel, dtype=value.dtype)


def _copy(move: ShardMove, source_P: Tensor, target_P: Tensor) -> None:
    target_P.narrow(0, move.target_offset, move.numel).copy_(
        source_P.narrow(0, move.source_offset, move.numel)
    )


def _renumbered(
    param_groups: Sequence[Mapping[str, Any]], old_groups: SubGroups, new_groups: SubGroups
) -> list[dict[str, Any]]:
    """The optimizer's parameter groups with the numbers of the new sub-groups."""
    # A sub-group never crosses parameter groups, so its first name tells the group
    group_of = {
        name: number
        for number, group in enumerate(param_groups)
        for index in group["params"]
        for name in old_groups[index]
    }
    params: list[list[int]] = [[] for _ in param_groups]
    for index, shapes in enumerate(new_groups):
        params[group_of[next(iter(shapes))]].append(index)
    return [{**group, "params": own} for group, own in zip(param_groups, params, strict=True)]


def _check_same_model(folder: Path, old_groups: SubGroups, new_groups: SubGroups) -> None:
    old = {name: tuple(shape) for group in old_groups for name, shape in group.items()}
    new = {name: tuple(shape) for group in new_groups for name, shape in group.items()}
    # Sorted: every rank names the same parameter
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise CheckpointError(
                f"{folder} is a checkpoint of another model: parameter {name} has shape {old.get(name)} there and "
                f"{new.get(name)} here (None: not trained); build the model that was saved, with the same "
                "parameters frozen"
            )


_OF_A_KIND = frozenset(("betas", "momentum", "lr_decay", "alpha", "rho", "lambd", "momentum_decay"))
"""Keys of parameter groups that tell optimizers apart."""
_POSITIONS = frozenset(("last_epoch", "last_batch_iteration"))
"""Keys of the position in schedulers of torch and of DeepSpeed."""


def _names_of_states(state: Mapping[str, Any]) -> list[str]:
    return sorted(name for name, value in state.items() if _is_elementwise(value))


def check_same_optimizer(folder: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise CheckpointError where states of one optimizer would go to one of another kind."""
    both = (saved, own)
    counts = [len(states["param_groups"]) for states in both]
    names = [
        {number: _names_of_states(state) for number, state in states[_STATE].items()}
        for states in both
    ]
    # Parameters that have not stepped yet have none: all at the start, half of Muon's.
    stepped = [number for number, of_saved in names[0].items() if of_saved and names[1].get(number)]
    kinds = [[own_names[number] for number in stepped] for own_names in names]
    if not stepped:
        kinds = [
            [sorted(_OF_A_KIND & {key for group in states["param_groups"] for key in group})]
            for states in both
        ]
    if kinds[0] != kinds[1] or counts[0] != counts[1]:
        theirs, ours = (
            f"{', '.join(sorted({*itertools.chain(*kind)})) or 'no momentum'} in {count} parameter groups"
            for kind, count in zip(kinds, counts, strict=True)
        )
        raise CheckpointError(
            f"{folder} has states of another optimizer ({theirs}; the one here has {ours}); resume with the optimizer "
            "that has saved it, or pass load_optimizer_states=False to load_checkpoint"
        )


def check_same_scheduler(folder: Path, saved: Any, scheduler: Any) -> None:
    """Raise CheckpointError where `scheduler` would not find its position in what was `saved`."""
    own = scheduler.state_dict()
    # Without its key a scheduler would stand at its begin, and say nothing
    if saved is None or _POSITIONS & own.keys() - saved.keys():
        found = "no state of a scheduler" if saved is None else "the state of another scheduler"
        raise CheckpointError(
            f"{folder} has {found}, and this run has a {type(scheduler).__name__}; resume with the scheduler that has "
            "saved it, or pass load_lr_scheduler_states=False to load_checkpoint, and the schedule begins anew"
        )


def _check_lengths(path: Path, flat_P: Sequence[Tensor], wanted: Sequence[int]) -> None:
    found = tuple(tensor.numel() for tensor in flat_P)
    if found != tuple(wanted):
        raise CheckpointError(
            f"{path} holds shards of {found} elements, expected {tuple(wanted)}: it was saved by another number "
            "of ranks or with another zero_optimization.sub_group_size than the rest"
        )
