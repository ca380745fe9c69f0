"""Files of a checkpoint that another rank, or another number of ranks, looks at."""

from __future__ import annotations

import pytest
import torch

from ds_hydra.engine.checkpointing import reshard
from ds_hydra.engine.checkpointing.files import MANIFEST_NAME, HydraCheckpointEngine, Saving
from ds_hydra.errors import CheckpointError


def test_a_file_that_a_rank_has_written_and_another_removed_is_missed(tmp_path):
    """Before `latest` names the checkpoint."""
    saving, writer = Saving(str(tmp_path), "step", "1"), HydraCheckpointEngine()
    saving.begin()
    written = saving.folder / "step"
    written.mkdir()
    for name in ("a.pt", "b.pt"):
        writer.save({"value": name}, str(written / name))
    writer.write_digests(saving.folder, 0)
    (written / "a.pt").unlink()
    with pytest.raises(CheckpointError, match=r"step lacks a\.pt, which a rank has written"):
        saving.commit(world_size=1, save_latest=True, ranks=[0])
    saving.unlock()
    assert not (written / MANIFEST_NAME).exists()
    assert not (tmp_path / "latest").exists()


def test_sub_groups_that_were_one_count_their_steps_apart(tmp_path):
    """Each of them adds one to its count in place."""
    state = {"step": torch.tensor(3.0), "exp_avg": torch.arange(5.0)}
    base = {"state": {0: state}, "param_groups": [{"params": [0]}]}
    zero = {"optimizer_state_dict": base, "fp32_flat_groups": [10 + torch.arange(5.0)]}
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": zero}, tmp_path / name)
    groups = [{"a": (2,), "b": (3,)}], 1, [{"a": (2,)}, {"b": (3,)}]
    found = reshard.read_optimizer_states(tmp_path, *groups, 0, 1)["optimizer_state_dict"]
    assert [flat.tolist() for flat in found["fp32_flat_groups"]] == [[10, 11], [12, 13, 14]]
    first, second = found["optimizer_state_dict"]["state"].values()
    assert [first["exp_avg"].tolist(), second["exp_avg"].tolist()] == [[0, 1], [2, 3, 4]]
    first["step"] += 1
    assert (float(first["step"]), float(second["step"])) == (4, 3)
