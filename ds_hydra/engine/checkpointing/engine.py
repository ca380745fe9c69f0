"""Checkpoints of a DeepSpeed engine that survive a crash: saving and loading, agreed on by all
ranks.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.engine import DeepSpeedEngine

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.checkpointing import files
from ds_hydra.engine.checkpointing.beside import HostCopies, SavingBeside
from ds_hydra.engine.checkpointing.reshard import (
    check_same_optimizer,
    check_same_scheduler,
    common_model_file,
    read_model_states,
    read_optimizer_states,
)
from ds_hydra.engine.model.adapters import with_resting_adapters
from ds_hydra.engine.model.held_models import saving_shards
from ds_hydra.engine.ranks.agreement import broadcast_text, raise_together
from ds_hydra.engine.ranks.watchdog import call_together, watch
from ds_hydra.errors import CheckpointError

if TYPE_CHECKING:
    from ds_hydra.engine.planning import IterationSource
    from ds_hydra.engine.propagation import Propagator
    from ds_hydra.engine.reporting import IterationReporter

logger = logging.getLogger(__name__)

_CLIENT_STATE_KEY = "ds_hydra"
"""Key of ds_hydra's part in a checkpoint's client state."""

_OPTIMIZER = "optimizer_state_dict"
_LOSS_SCALE_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow")
"""Attributes that a ZeRO-3 optimizer keeps when only weights, or another precision, are loaded."""


def _as_name(tag: Any) -> Any:
    """`tag` as the name of a folder: a number becomes its text, as DeepSpeed has it."""
    return str(tag) if isinstance(tag, Real) and not isinstance(tag, bool) else tag


class CheckpointingEngine(DeepSpeedEngine):
    """DeepSpeed's saving and loading, whole or not at all, from and to any number of ranks.

    Methods are collective: all ranks call them with the same arguments.
    """

    _beside: SavingBeside | None = None
    """The checkpoint that is written beside training, until all ranks know how that has ended."""
    _copies: HostCopies | None = None
    source: IterationSource
    """Source of iterations, whose state goes into a checkpoint beside DeepSpeed's own."""
    propagator: Propagator
    """Runs their plans on this rank."""
    reporter: IterationReporter
    """Reports what they did."""
    _hydra_config: HydraConfig

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """DeepSpeed's checkpoint, written aside and put in its place whole (see
        engine/checkpointing/files.py).

        Its client state also holds the position in the data, the cost model and the configuration.
        Raises CheckpointError on all ranks where one of them could not write, was given other
        arguments, or another job is saving to `save_dir`; then the checkpoint before it stays.
        With `hydra.checkpoint.asynchronous` it returns when the states are copied, and what fails
        later is raised by the next `train_batch`, `save_checkpoint`, `load_checkpoint` or
        `destroy`.
        """
        with watch("saving"):
            call_together("save_checkpoint()", self.device)
            # One at a time: both would take the same memory for copies and the same lock
            self._settle_saving(waits=True)
            self._together(lambda: files.check_client_state(client_state or {}))
            is_beside = self._hydra_config.checkpoint.asynchronous
            tag = f"global_step{self.global_steps}" if tag is None else _as_name(tag)
            saving = files.Saving(save_dir, tag, self._agree_on_saving(save_dir, tag))
            # Times of the last iteration are learned from before the state is taken
            self.reporter.finish()
            state = {**(client_state or {}), _CLIENT_STATE_KEY: self.source.state_dict()}
            # Not by LOCAL_RANK: a launcher may give all ranks of a host 0, and a device each
            sharing = self._ranks_sharing_a_folder()
            commits = self.global_rank == sharing[0]
            commit = functools.partial(
                saving.commit,
                world_size=self.world_size,
                save_latest=save_latest,
                ranks=sharing,
            )
            try:
                self._together(saving.begin if commits else None)
                self._together(saving.check_shared)
                folder = str(saving.folder)
                if is_beside:
                    self.checkpoint_engine.hold = self._begin_copies()
                with saving_shards():
                    # Never `latest`: the commit writes it, once the files of all are there
                    super().save_checkpoint(folder, tag, state, False, exclude_frozen_parameters)
                if is_beside:
                    writer = self.checkpoint_engine.detach()
                    # Of folders, and of files that could not be held and were written at once
                    raise_together(writer.take_error(), self.device)
                    self._beside = SavingBeside(
                        saving,
                        writer,
                        self.global_rank,
                        self.device,
                        ranks=sharing,
                        commit=commit if commits else None,
                    )
                    return True
                self.checkpoint_engine.write_digests(saving.folder, self.global_rank)
                raise_together(self.checkpoint_engine.take_error(), self.device)
                # Every rank's files are there: until here the checkpoint before is the latest one.
                self._together(commit if commits else None)
            except CheckpointError:
                if commits:
                    saving.abort()
                raise
            finally:
                self.checkpoint_engine.detach()
                if self._beside is None:  # which does so itself
                    saving.unlock()
        return True

    def wait_for_checkpoint(self) -> None:
        """Return when the checkpoint that is written beside training, if any, is in its place; its
        error is raised on all ranks.
        """
        if self._beside is not None:
            with watch("saving"):
                call_together("wait_for_checkpoint()", self.device)
                self._settle_saving(waits=True)

    def after_checkpoint(self, action: Callable[[Exception | None], None]) -> None:
        """Run `action` with the error, if any, of the checkpoint that is being written, when that
        is over: on its thread, at once where there is none. Not collective.
        """
        action(None) if self._beside is None else self._beside.then(action)

    def _settle_saving(self, *, waits: bool) -> None:
        """Forget the checkpoint that is written beside training, where it is complete or has
        failed; wait for that where it `waits`. Raises its error on all ranks.
        """
        saving = self._beside
        if saving is None:
            return
        try:
            if not (saving.wait() if waits else saving.look()):
                return
        except CheckpointError:  # after anything else the thread goes on
            self._beside = None
            raise
        self._beside = None

    def _begin_copies(self) -> Callable[[Any], Any]:
        """The copier of this checkpoint's states, into the memory of the one before."""
        if self._copies is None:
            beside = self.propagator.hosts.ranks_beside(self.global_rank)
            self._copies = HostCopies(self.device, len(beside))
        self._copies.begin()
        return self._copies.take

    def _agree_on_saving(self, save_dir: Any, tag: Any) -> str:
        """The id of a saving whose arguments are valid and equal on all ranks."""

        def check() -> None:
            files.check_folder_name("save_dir", save_dir)
            files.check_new_tag(tag)

        self._together(check)
        mine = [os.fspath(save_dir), tag]
        *first, saving_id = broadcast_text([*mine, secrets.token_hex(4)], 0, self.device)

        def compare() -> None:
            # Storage of each node may have another name on each.
            if tag != first[1] or (mine != first and not self.use_node_local_storage()):
                raise CheckpointError(
                    f"save_checkpoint got save_dir {mine[0]!r} and tag {tag!r} on rank {self.global_rank}, and "
                    f"{first[0]!r} and {first[1]!r} on rank 0; pass the same on all ranks"
                )

        self._together(compare)
        return saving_id

    def _ranks_sharing_a_folder(self) -> Sequence[int]:
        """All ranks, those of this host where each has storage of its own."""
        if self.use_node_local_storage():
            return self.propagator.hosts.ranks_beside(self.global_rank)
        return range(self.world_size)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        *,
        load_data_position: bool = True,
    ) -> Any:
        """DeepSpeed's `load_checkpoint`; training continues with the global batch after the
        checkpoint, without `load_data_position` with the data that is attached from its beginning.

        The checkpoint may have been saved by another number of ranks, or by stock DeepSpeed. Files
        that are not as they were written are refused by name (CheckpointError, on all ranks), and
        nothing but tensors and plain values is unpickled. With `load_module_only` only weights are
        loaded: the position in the data, the step count and the optimizer stay as they are.
        """
        if not hasattr(self.optimizer, "fp16_groups"):
            raise CheckpointError(
                f"load_checkpoint({load_dir!r}) wants an engine with an optimizer, which weights are read into "
                '(fp32 copies); give ds_hydra.initialize one (the DeepSpeed config its "optimizer" section), or '
                "load the model from the weights that save_16bit_model() or zero_to_fp32.py in that folder write"
            )
        with watch("loading"):
            call_together("load_checkpoint()", self.device)
            self._settle_saving(waits=True)
            universal = self.load_universal_checkpoint()
            tag = self._agree_on_tag(load_dir, tag, "latest_universal" if universal else "latest")
            if tag is None:
                return super().load_checkpoint(load_dir, None)  # which says what is missing
            folder, readers = Path(load_dir, tag), self._ranks_sharing_a_folder()
            reader = readers.index(self.global_rank)
            self._together(lambda: files.verify(folder, reader=reader, num_readers=len(readers)))
            if not universal:
                is_checked = load_optimizer_states and not load_module_only
                goes_on = load_lr_scheduler_states and not load_module_only
                self._together(
                    lambda: self._read_checkpoint(
                        folder,
                        load_optimizer_states,
                        is_checked=is_checked,
                        scheduler=self.lr_scheduler if goes_on else None,
                    )
                )
            # Before loading: DeepSpeed overwrites them
            scaler = {key: getattr(self.optimizer, key) for key in _LOSS_SCALE_KEYS}
            rates = self._given_rates()
            try:
                with files.only_weights():
                    path, client_state = super().load_checkpoint(
                        load_dir,
                        tag,
                        load_module_strict,
                        load_optimizer_states or not universal,  # what was read stands in for it
                        load_lr_scheduler_states,
                        load_module_only,
                        custom_load_fn,
                    )
                # DeepSpeed restores placeholders of size 0 then: weights come from the fp32 shards
                if load_module_only and not universal:
                    states = self.checkpoint_engine.handed["_optim_states.pt"][_OPTIMIZER]
                    states = [states] * self.world_size
                    self.optimizer.load_state_dict(states, load_optimizer_states=False)
            finally:
                self.checkpoint_engine.handed = {}
            # DeepSpeed's step divides by the checkpoint's scale, whatever this run multiplies by.
            is_dynamic = scaler["dynamic_loss_scale"] and self.optimizer.dynamic_loss_scale
            if load_module_only or not is_dynamic:
                self._keep_loss_scale(scaler)
            state = (client_state or {}).get(_CLIENT_STATE_KEY, {})
            # DeepSpeed returns much of its own, too, which could not be saved with the user's.
            client_state = client_state and {
                key: value for key, value in client_state.items() if key not in files.RESERVED_KEYS
            }
            saved = self._given_rates()
            if saved != rates and load_lr_scheduler_states and self.global_rank == 0:
                logger.info(
                    f"learning rates go on at the checkpoint's {saved}, not at this run's {rates}, as in DeepSpeed and "
                    "transformers; to change them set lr in engine.optimizer.param_groups, or base_lrs of a schedule, "
                    "after loading"
                )
            if not load_module_only:  # new data may start from another run's weights
                self.source.load_state_dict(state, self.global_steps, position=load_data_position)
            return path, client_state

    def _given_rates(self) -> list[float]:
        """Configured learning rates of each group: those that a schedule of torch starts from, or
        those of a run without a schedule. None under a schedule of DeepSpeed.
        """
        groups = self.optimizer.param_groups
        if self.lr_scheduler is None:
            return [float(group.get("initial_lr", group["lr"])) for group in groups]
        return [float(group["initial_lr"]) for group in groups if "initial_lr" in group]

    def _keep_loss_scale(self, own: Mapping[str, Any]) -> None:
        """Restore the loss scale of before a checkpoint was loaded: `_LOSS_SCALE_KEYS`."""
        saved, kept = self.optimizer.loss_scaler.cur_scale, own["loss_scaler"].cur_scale
        for key, value in own.items():
            setattr(self.optimizer, key, value)
        if saved != kept and self.global_rank == 0:
            logger.info(
                "the checkpoint's loss scale of %g is not taken; this run has %g by its own configuration",
                saved,
                kept,
            )

    def _read_checkpoint(
        self, folder: Path, load_optimizer_states: bool, *, is_checked: bool, scheduler: Any
    ) -> None:
        """Read the checkpoint's files for this rank, whatever number of ranks has saved it, before
        anything is changed. `is_checked`: whether the optimizer has to be of the same kind;
        `scheduler`, if any, has to be.
        """
        rank, world_size = self.global_rank, self.world_size
        old_world = files.read_tensors(common_model_file(folder, rank), mmap=True)["dp_world_size"]
        if self.use_node_local_storage() and old_world != world_size:
            raise CheckpointError(
                f"{folder} was saved by {old_world} ranks on storage of each node, and there are {world_size}; "
                f"resume on {old_world} ranks, or copy the files of all nodes to a folder that all share and remove "
                "checkpoint.use_node_local_storage"
            )
        model = read_model_states(folder, rank, world_size)
        if scheduler is not None:
            check_same_scheduler(folder, model["lr_scheduler"], scheduler)
        groups = self._get_zero_param_shapes()
        optim = read_optimizer_states(
            folder, model["param_shapes"], old_world, groups, rank, world_size
        )
        own = self.optimizer.state_dict()[_OPTIMIZER]
        zero = optim[_OPTIMIZER]
        if is_checked:
            check_same_optimizer(folder, zero[_OPTIMIZER], own)
        # What was read has to hold some states: this run's own stay as they are
        if not load_optimizer_states:
            zero[_OPTIMIZER] = own
        self.checkpoint_engine.handed = {"_model_states.pt": model, "_optim_states.pt": optim}

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """DeepSpeed's, with an error of writing raised on all ranks."""
        with watch("saving"):
            is_saved = super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)
            raise_together(self.checkpoint_engine.take_error(), self.device)
        return is_saved

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        with watch("saving"):
            call_together("save_16bit_model() or save_model()", self.device)
            with with_resting_adapters(self.module):
                return super()._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _agree_on_tag(self, load_dir: str, tag: str | None, latest: str) -> str | None:
        """The folder of the given checkpoint, or of the one that rank 0 sees as the last; None
        without one.
        """

        def look() -> str:
            files.check_folder_name("load_dir", load_dir)
            wanted = files.find_tag(Path(load_dir), latest) if tag is None else _as_name(tag)
            return "" if wanted is None else files.resolve_tag(Path(load_dir), wanted)

        found = self._together(look if self.global_rank == 0 else None)
        return broadcast_text([found or ""], 0, self.device)[0] or None

    def _together(self, action: Callable[[], Any] | None) -> Any:
        """Run `action`, if this rank has one, in `do_together`."""
        return files.do_together(action or (lambda: None), self.device)

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        self.checkpoint_engine = files.HydraCheckpointEngine()

    def _copy_recovery_script(self, save_path: str) -> None:
        self.checkpoint_engine.keep_error(
            functools.partial(super()._copy_recovery_script, save_path)
        )

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]:
        # DeepSpeed looks for the file of this very rank, which a smaller world has not written.
        if self.load_universal_checkpoint():
            return super()._get_all_ckpt_names(checkpoints_path, tag)
        return [str(common_model_file(Path(checkpoints_path, tag), self.global_rank))]
