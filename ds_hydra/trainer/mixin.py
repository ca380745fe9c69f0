"""Common part of every Trainer on HydraEngine, whoever draws its global batches: the engine in the
loop, checkpoint folders, and counters in its log and bar.

The overrides use names of transformers 5; a test compares them with the installed version.

[Note: Checkpoint folders of the Trainer]
A folder is either whole or not there under its name. While it is written, `checkpoint-3` is called
`_saving-checkpoint-3`, as in engine/checkpointing/files.py; `push_to_hub` leaves out `_*`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer
from transformers.optimization import GreedyLR
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, ProgressCallback, TrainerState
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    SaveStrategy,
    get_last_checkpoint,
    rotate_checkpoints,
)

from ds_hydra.configs import HydraConfig, read_ds_config
from ds_hydra.configs.ds_config import dtype_name, with_known_names
from ds_hydra.engine import HydraEngine, hydra_engine_class
from ds_hydra.engine.checkpointing.files import (
    MANIFEST_NAME,
    do_together,
    lock_folder,
    make_folder,
    put_in_place,
    restore_replaced,
    try_folder,
    unlock,
)
from ds_hydra.engine.checks.deepspeed_section import check_buildable
from ds_hydra.engine.hydra_engine import needs_metric
from ds_hydra.engine.model.adapters import check_trains, unify_adapter_dtype, unwrap_adapters
from ds_hydra.engine.model.language_model import freeze_other_parts
from ds_hydra.engine.model.liger import complete_settings
from ds_hydra.engine.ranks.agreement import raise_together, run_together
from ds_hydra.engine.ranks.watchdog import call_together, names_losses
from ds_hydra.errors import HydraConfigError
from ds_hydra.progress import Progress, is_terminal, no_bars_in_files
from ds_hydra.records.metrics import IterationMetrics, describe_flops
from ds_hydra.trainer.arguments import (
    Note,
    check_dtype,
    check_dtype_of_evaluation,
    drop_batch_size_mismatches,
    is_overridden,
    map_arguments,
    section_of_json,
)

logger = logging.getLogger(__name__)


def say_nothing(_message: str) -> None:
    """Replace a warning that has been shown already."""


class EngineMixin:
    """A `transformers.Trainer` whose optimizer steps are `HydraEngine.train_batch`: configuration,
    the engine, checkpoints and logs. Stands before the Trainer among the bases.
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if Trainer in (mro := cls.__mro__) and mro.index(Trainer) < mro.index(EngineMixin):
            raise HydraConfigError(
                f"{cls.__name__} has the Trainer before the mixin among its bases, and would train without ds_hydra; "
                "write it first: class Mine(HydraMixin, SFTTrainer)"
            )

    def __init__(self, *args: Any, **kwargs: Any):
        self._trained, self._since_log = Counters(), Counters()
        self._of_engine: tuple[Any, Any] = (None, None)
        self._stop_dir: str | None = None
        self._saves_together = False
        super().__init__(*args, **kwargs)
        self._refuse_optimizers(self._warn)
        ds_config = self.accelerator.state.deepspeed_plugin.hf_ds_config.config
        check_dtype(self.model, getattr(torch, dtype_name(ds_config)), self._warn)
        # The engine adds it, to slices of the embedding; transformers would to the whole one
        self.neftune_noise_alpha = None
        self._check_used(self._warn)
        self._show_strategy_in_progress_bar()

    def _refuse_optimizers(self, note: Note = say_nothing) -> None:
        """Refuse, before an engine starts, settings that transformers drops with DeepSpeed. `note`
        a method that calls the one it overrides, which may be all it does.
        """
        for name, own in zip(("optimizer", "lr_scheduler"), self._of_engine, strict=True):
            if (given := getattr(self, name)) is not None and given is not own:
                raise HydraConfigError(
                    f"{name} is a {type(given).__name__} that was given or made before train(), and transformers does "
                    "not use it with DeepSpeed; leave it out and pass optimizer_cls_and_kwargs, or override "
                    "create_optimizer() or create_scheduler()"
                )
        of_optimizer = "optimizer_cls_and_kwargs" if self.optimizer_cls_and_kwargs else ""
        for section, given in (("optimizer", of_optimizer), ("scheduler", "")):
            method = f"create_{section}"
            given = given or f"{method}()" * is_overridden(self, method)
            if not given or not section_of_json(self.args, section):
                continue
            problem = (
                f"{type(self).__name__} has {given} of its own, and the JSON has the section {section!r}, which "
                "is what would be used; remove one of them"
            )
            names = getattr(getattr(getattr(self, method), "__code__", None), "co_names", ())
            if given == "optimizer_cls_and_kwargs" or "super" not in names:
                raise HydraConfigError(problem)
            note(problem)

    def _check_used(self, note: Note) -> None:
        """Refuse settings that would be dropped; again before training, as all can be set."""
        raise NotImplementedError

    def _check_arguments(self) -> None:
        """Refuse arguments before transformers acts on them."""
        raise NotImplementedError

    def _complete_config(self, ds_config: dict[str, Any]) -> None:
        """Add this Trainer's settings to the DeepSpeed configuration."""

    def _attach_data(self) -> None:
        """Give the engine its training data, before a checkpoint is loaded."""

    # ---- Configuration

    def create_accelerator_and_postprocess(self) -> None:
        """Override of transformers: reads and validates the "hydra" section, and fills in what
        ds_hydra needs around it.
        """
        self._check_arguments()
        if self.args.should_save:  # as transformers does next, without a word of the key
            make_folder(Path(self.args.output_dir), "output_dir")
        if self.args.use_liger_kernel:  # transformers patches the model after this
            settings = self.args.liger_kernel_config
            self.args.liger_kernel_config = complete_settings(unwrap_adapters(self.model), settings)
        self._forget_accelerator()
        if (plugin := self.args.deepspeed_plugin) is not None:
            ds_config = plugin.hf_ds_config.config
            known = with_known_names(ds_config)  # and those alone accelerate knows
            ds_config.clear()
            ds_config.update(known)
        super().create_accelerator_and_postprocess()
        if not self.is_deepspeed_enabled:
            if self.args.deepspeed_plugin is not None and "ACCELERATE_USE_CPU" in os.environ:
                raise HydraConfigError(
                    "`accelerate launch --cpu` (ACCELERATE_USE_CPU) switches off the DeepSpeed that TrainingArguments "
                    "ask for; start with `torchrun --nproc-per-node N train.py` and pass "
                    "TrainingArguments(use_cpu=True)"
                )
            raise HydraConfigError(
                f"{type(self).__name__} needs DeepSpeed: pass TrainingArguments(deepspeed='ds_config.json'), or start "
                "with accelerate launch --use_deepspeed"
            )
        num_ranks = int(os.environ.get("WORLD_SIZE", 1))
        if self.args.world_size != num_ranks:  # each rank would take itself for the first
            raise HydraConfigError(
                f"transformers counts {self.args.world_size} ranks, the launcher started {num_ranks}; on CPU pass "
                "TrainingArguments(use_cpu=True)"
            )
        hf_config = self.accelerator.state.deepspeed_plugin.hf_ds_config
        drop_batch_size_mismatches(hf_config)
        # DeepSpeed would clip nothing where the key is missing
        hf_config.config.setdefault("gradient_clipping", self.args.max_grad_norm or 0.0)
        self._complete_config(hf_config.config)
        filled_in, hydra = read_ds_config(hf_config.config)
        check_buildable(filled_in)
        # In place: transformers and accelerate hold the same object. DeepSpeed ignores the "hydra"
        # section.
        hf_config.config.update(filled_in)
        check_dtype_of_evaluation(self.args, filled_in)
        local = (filled_in.get("checkpoint") or {}).get("use_node_local_storage")
        if local and not self.args.save_on_each_node:
            self.args.save_on_each_node = True
            self._warn("checkpoint.use_node_local_storage sets save_on_each_node to True")
        self._hydra_section = hydra
        self.hydra_config: HydraConfig = map_arguments(self.args, hydra, self._warn)

    def _forget_accelerator(self) -> None:
        """Let accelerate be set up again with the plugin of the same arguments, which it refuses:
        an earlier Trainer's, whose engine may be gone.
        """
        plugin = self.args.deepspeed_plugin
        if plugin is not None and plugin is AcceleratorState._shared_state.get("deepspeed_plugins"):
            AcceleratorState._reset_state()

    @contextlib.contextmanager
    def _starting_engine(self) -> Iterator[None]:
        """Let DeepSpeed build a HydraEngine inside; afterwards the configuration is as before.

        Trainers of the same arguments share it, and transformers writes into it what belongs to one
        start: evaluation takes the optimizer out, and "auto" becomes the numbers of this training.
        """
        plugin = self.accelerator.state.deepspeed_plugin
        shared = plugin.hf_ds_config
        before, mismatches = copy.deepcopy(shared.config), list(shared.mismatches)
        with hydra_engine_class(self.hydra_config):
            try:
                yield
            finally:  # the engine keeps what it was given
                shared.config = plugin.deepspeed_config = before
                shared.mismatches = mismatches

    @property
    def engine(self) -> HydraEngine:
        """The engine, which exists from the beginning of `train` (or of the first `evaluate`)
        on.
        """
        if not isinstance(self.deepspeed, HydraEngine):
            raise HydraConfigError(
                "the engine is created by train() or evaluate(); call one of them first"
            )
        return self.deepspeed

    def _warn(self, message: str) -> None:
        if self.args.process_index == 0:
            logger.warning(message)

    def _show_strategy_in_progress_bar(self) -> None:
        shown = self.callback_handler.pop_callback(ProgressCallback)
        if shown is not None and type(shown) is ProgressCallback:
            shown = StrategyProgressCallback(lambda: self.deepspeed and self.engine.ended_metrics)
        if shown is not None:
            self.callback_handler.add_callback(shown)

    # ---- Training

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Override of transformers. After another `train` or `evaluate` it has a new engine and new
        optimizer states, on the weights that the model has then.
        """
        self._call_together("train()")
        self._check_used(say_nothing)
        # Arguments may be set, too: the seed of a second run
        self.hydra_config = map_arguments(self.args, self._hydra_section, say_nothing)
        if self.deepspeed is None:
            self._refuse_optimizers()
        else:
            self._forget_engine()
        if resume_from_checkpoint is True:
            # What a crash has left between the two renames of a checkpoint that was written again
            folder, commits = Path(self.args.output_dir), self.args.should_save
            do_together(lambda: restore_replaced(folder) if commits else None, self.args.device)
        if resume_from_checkpoint:
            # Of each rank its own: folders of nodes may differ
            check = functools.partial(
                check_checkpoint, resume_from_checkpoint, self.args.output_dir
            )
            run_together(check, self.args.device)
        try:
            with names_losses():
                output = super().train(resume_from_checkpoint, *args, **kwargs)
                self._call_together("the end of train()")
                return output
        finally:
            self._stop_dir = None
            if isinstance(self.deepspeed, HydraEngine) and not self.deepspeed.is_destroyed:
                self.deepspeed.leave_sigterm()

    def _call_together(self, call: str) -> None:
        """Raise on all ranks where a callback, whose flags are each rank's own, has led some to
        `call` and others elsewhere.
        """
        if not dist.is_initialized():
            return
        if not (isinstance(self.deepspeed, HydraEngine) and self.deepspeed.is_destroyed):
            call_together(call, self.args.device)

    def _forget_engine(self) -> None:
        """Destroy the engine, and release its inputs. Raises HydraConfigError for an optimizer or a
        schedule that was set since then.
        """
        self._refuse_optimizers()
        self.engine.destroy()
        self.accelerator.deepspeed_engine_wrapped = None
        self.accelerator.free_memory()
        self.deepspeed, self.model_wrapped = None, self.model
        self.optimizer = self.lr_scheduler = None
        self._of_engine = (None, None)

    @contextlib.contextmanager
    def _calling(self, call: str) -> Iterator[None]:
        if isinstance(self.deepspeed, HydraEngine) and self.deepspeed.is_destroyed:
            self._forget_engine()
        with names_losses():
            self._call_together(call)
            yield

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Override of transformers."""
        with self._calling("evaluate()"):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Override of transformers."""
        with self._calling("predict()"):
            return super().predict(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Override of transformers, in the dtype of training: a cast would stay. Evaluation before
        training starts an engine.
        """
        self._check_used(say_nothing)
        names = ("bf16_full_eval", "fp16_full_eval")
        asked = {name: getattr(self.args, name) for name in names}
        vars(self.args).update(dict.fromkeys(names, False))
        try:
            with self._starting_engine():
                return super().evaluation_loop(*args, **kwargs)
        finally:
            vars(self.args).update(asked)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        freeze_other_parts(self.model)
        check_trains(self.model)
        unify_adapter_dtype(self.model, self._warn)
        self._try_saving()
        try:
            with self._starting_engine():
                model, train_dataloader = super()._prepare_for_training(
                    max_steps, train_dataloader, None
                )
        except BaseException:
            if self.deepspeed is None:  # what was made for this start is nobody's at the next one
                self.optimizer = self.lr_scheduler = None
            raise
        self.engine.on_sigterm = self._note_stop
        self._take_scheduler()
        self._attach_data()
        # After the data, whose position is in the checkpoint
        if resume_from_checkpoint is not None:
            self._load_engine(resume_from_checkpoint)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
        self._trained, self._since_log = Counters(), Counters()
        self._of_engine = (self.optimizer, self.lr_scheduler)
        return model, train_dataloader

    def _try_saving(self) -> None:
        """Find what would fail at the first checkpoint. Collective over all ranks."""
        args, faults = self.args, self.hydra_config.faults
        is_saved = args.save_strategy != SaveStrategy.NO
        if is_saved:
            try_folder(
                Path(args.output_dir),
                "output_dir",
                args.device,
                commits=args.should_save,
                writes=not args.save_only_model,
            )
        is_own = is_overridden(self, "_save", "save_model")
        refuses = (is_saved or faults.save_on_sigterm is not None) and not is_own
        run_together(lambda: self._try_parts(refuses) if args.should_save else None, args.device)

    def _try_parts(self, refuses: bool) -> None:
        """Raise HydraConfigError, or else warn, where what a checkpoint holds beside tensors cannot
        be saved.
        """
        model, tokenizer = self.model, self.processing_class
        parts: dict[str, Callable[[str], Any]] = {
            "TrainingArguments": lambda folder: torch.save(self.args, f"{folder}/args")
        }
        if isinstance(model, PreTrainedModel) and model.can_generate():
            parts["model.generation_config"] = model.generation_config.save_pretrained
        if tokenizer is not None:
            parts["processing_class"] = lambda folder: tokenizer.save_pretrained(folder)
        for name, save in parts.items():
            try:
                with tempfile.TemporaryDirectory() as folder:
                    save(folder)
            except OSError:  # a full /tmp says nothing of what is saved
                continue
            except Exception as error:  # whatever these classes raise
                problem = f"{name} cannot be saved, as it is with every checkpoint: {error}"
                if refuses:
                    raise HydraConfigError(problem) from error
                self._warn(problem)

    def _load_engine(self, checkpoint: str) -> None:
        found, _ = self.engine.load_checkpoint(
            checkpoint,
            load_module_strict=unwrap_adapters(self.model) is self.model,
            load_data_position=not self.args.ignore_data_skip,
        )
        if found is None:
            raise HydraConfigError(
                f"{checkpoint} holds no state of an engine, with a file `latest` that names it (save_only_model=True "
                "saves weights alone, a Trainer without DeepSpeed another optimizer); train anew from its weights with "
                "from_pretrained(), or resume from a checkpoint of an engine"
            )
        counted = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
        is_own = any(Path(checkpoint).glob(f"*/{MANIFEST_NAME}"))  # others may count differently
        if is_own and counted.global_step != self.engine.global_steps:
            self._warn(
                f"{checkpoint} is mixed of two: its {TRAINER_STATE_NAME} is of step {counted.global_step}, its weights "
                f"and optimizer are of step {self.engine.global_steps}; resume from another checkpoint"
            )

    def _take_scheduler(self) -> None:
        """Let the loop step a schedule that wants a metric: accelerate has wrapped DeepSpeed's, so
        that neither would.
        """
        scheduler = self.engine.lr_scheduler
        if not needs_metric(self.lr_scheduler if scheduler is None else scheduler):
            return
        if scheduler is not None:
            self.lr_scheduler = self.callback_handler.lr_scheduler = scheduler
        is_known = isinstance(self.lr_scheduler, (ReduceLROnPlateau, GreedyLR))
        args = self.args
        if not is_known or args.metric_for_best_model is None or args.eval_strategy == "no":
            raise HydraConfigError(
                f"the schedule is {type(self.lr_scheduler).__name__}, whose step() needs a metric of evaluation, and "
                f"eval_strategy is {str(args.eval_strategy.value)!r}, metric_for_best_model "
                f"{args.metric_for_best_model!r}; set "
                "lr_scheduler_type='reduce_lr_on_plateau' or 'greedy', eval_strategy='steps' and "
                "metric_for_best_model='loss'"
            )

    def _note_stop(self) -> None:
        self._stop_dir = self.hydra_config.faults.save_on_sigterm

    def _end_if_asked(self) -> None:
        """Save a checkpoint and end, where SIGTERM was noted."""
        if self._stop_dir is not None:
            self._save_checkpoint(self.model, None)
            self.engine.end_on_sigterm(self._stop_dir)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Tensor,
        grad_norm: Any,
        model: nn.Module,
        trial: Any,
        *rest: Any,
        **named: Any,
    ) -> None:
        """Override of transformers: after SIGTERM nothing is evaluated, and a checkpoint is the
        end, whatever callbacks ask for.
        """
        self._forget_requests()
        if self.control.should_log:
            self._call_together("logging")
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *rest, **named)
        self._end_if_asked()

    def _forget_requests(self) -> None:
        """Forget, after SIGTERM, an evaluation or a checkpoint that callbacks want besides."""
        if self._stop_dir is not None:
            self.control.should_evaluate = self.control.should_save = False

    def _count_iteration(self) -> None:
        """Take the last iteration into the counters."""
        for counters in (self._trained, self._since_log):
            counters.add(self.engine.last_metrics)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as transformers does; after SIGTERM leave out the rest of the evaluation."""
        output = super().prediction_step(*args, **kwargs)
        self.engine.look_for_sigterm()
        self._end_if_asked()
        return output

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> Any:
        self.engine.look_for_sigterm()  # before the best weights are loaded
        self._end_if_asked()
        self.engine.wait_for_checkpoint()
        steps = self.state.global_step - self._initial_global_step
        exact = self._trained.num_sequences * max(self.state.max_steps, 1) / max(steps, 1)
        output = super()._finalize_training(trial, exact, start_time)
        self.engine.on_sigterm = None
        self.engine.source.close_feed()
        return output

    # ---- Checkpoints

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Override of transformers. When it returns, on any rank, the files of the first one are
        there; its error is raised on all.
        """
        self._saves_together = True
        try:
            super().save_model(*args, **kwargs)
        finally:
            self._saves_together = False

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Override of transformers, without a bar where nobody looks on. Scripts call it on one
        rank alone, so that only `save_model` waits for all.
        """
        save = functools.partial(super()._save, output_dir, state_dict)
        # With save_on_each_node others save, too, and have no weights
        has_weights = state_dict is not None or self.args.process_index == 0
        with no_bars_in_files():
            if self._saves_together:
                run_together(save if has_weights else lambda: None, self.args.device)
            else:
                save()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Override of transformers, written aside: `checkpoint-N` appears when complete."""
        self._call_together("saving a checkpoint of the Trainer")
        self.engine.wait_for_checkpoint()
        state, args = self.state, self.args
        parent = self._stop_dir or self._get_output_dir(trial)
        folder = Path(parent, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if trial is None:
            self.store_flos()
        if state.best_global_step:
            best = folder.with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best == folder or best.exists():
                state.best_model_checkpoint = str(best)
        rotate = functools.partial(
            rotate_checkpoints,
            output_dir=str(folder.parent),
            save_total_limit=args.save_total_limit if self._stop_dir is None else None,
            best_model_checkpoint=state.best_model_checkpoint,
            use_mtime=True,
        )
        aside = written_aside(
            folder, self.engine, rotate, commits=args.should_save, device=args.device
        )
        with aside as written:
            self._write_checkpoint(str(written))
            if args.save_on_each_node != self.engine.use_node_local_storage():
                self.engine.wait_for_checkpoint()  # other ranks commit there than here
        if args.push_to_hub:
            self.engine.wait_for_checkpoint()
            self._push_from_checkpoint(str(folder))

    def _write_checkpoint(self, folder: str) -> None:
        self.save_model(folder, _internal_call=True)
        if not self.args.save_only_model or self._stop_dir is not None:
            self._save_optimizer_and_scheduler(folder)
            self._save_scaler(folder)
            self._save_rng_state(folder)
        if self.args.should_save:
            self._note_callbacks()
            self.state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))

    def _note_callbacks(self) -> None:
        """Put the state that callbacks carry over a resume into the Trainer's, as transformers."""
        stateful = self.state.stateful_callbacks
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(stateful[name], list):
                    stateful[name].append(callback.state())
                else:
                    stateful[name] = callback.state()

    def hyperparameter_search(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused: transformers rebuilds the DeepSpeed configuration for each trial."""
        raise HydraConfigError(
            "hyperparameter_search() is not supported, because transformers makes a DeepSpeed configuration for each "
            "trial that ds_hydra has not read; start one run per trial"
        )

    # ---- Logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Override of transformers: with the loss come tokens/s and the pipelines' imbalance since
        the last log.
        """
        if "loss" in logs and self._since_log.num_iterations:
            logs |= self._since_log.summary()
            self._since_log = Counters()
        super().log(logs, start_time)
        self._forget_requests()

    def floating_point_ops(self, inputs: Any) -> float:
        """FLOPs of the iteration (`flops.py`), this rank's share (transformers sums over ranks); 0
        where they are not counted.
        """
        plan = self.engine.last_plan
        flops = self.engine.reporter.flops.of(plan.lengths) / plan.num_devices
        return 0.0 if math.isnan(flops) else flops

    def store_flos(self) -> None:
        """Add the FLOPs of all ranks to the state, without asking them or the device."""
        self.state.total_flos += self.current_flos * self.args.world_size
        self.current_flos = 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += self.engine.last_metrics.num_tokens


@contextlib.contextmanager
def written_aside(
    folder: Path,
    engine: HydraEngine,
    rotate: Callable[[], object],
    *,
    commits: bool,
    device: torch.device,
) -> Iterator[Path]:
    """The folder to write to in place of `folder`, which it becomes when all ranks have written,
    also what `engine` writes beside training; then older ones are removed by `rotate`.

    Collective over all ranks; those that `commits` make and rename it: one on each file system.
    Errors of writing are raised on all ranks as CheckpointError, and then nothing has changed.
    """
    aside = folder.with_name(f"_saving-{folder.name}")

    def finish(error: Exception | None) -> None:
        with held:
            try:
                if error is None:
                    put_in_place(aside, folder)
                    rotate()
            finally:
                shutil.rmtree(aside, ignore_errors=True)

    with contextlib.ExitStack() as opened:
        do_together(lambda: opened.enter_context(made_anew(aside)) if commits else None, device)
        held = opened.pop_all()
    error: Exception | None = None
    try:
        yield aside
    except Exception as caught:
        error = caught
    except BaseException:
        held.close()
        raise
    try:
        raise_together(error, device)
    except Exception as caught:
        failure = caught
        if commits:
            engine.after_checkpoint(lambda _: finish(failure))
        raise
    do_together(lambda: engine.after_checkpoint(finish) if commits else None, device)


def check_checkpoint(path: str | Path | bool, output_dir: str = "") -> None:
    """Raise HydraConfigError where `path` is no Trainer's checkpoint.

    True is the last one of `output_dir`; where it has none, transformers says so.
    """
    if path is True:
        path = (get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None) or ""
    if not path:
        return
    folder = Path(path)
    try:
        TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
        return
    except (FileNotFoundError, NotADirectoryError):
        problem = f"has no {TRAINER_STATE_NAME}"
    except (OSError, ValueError, TypeError) as error:
        problem = f"has a {TRAINER_STATE_NAME} that cannot be read ({error})"
    raise HydraConfigError(
        f"resume_from_checkpoint={str(path)!r} {problem}; expected the folder of a checkpoint, or "
        "True for the last one of output_dir"
    )


@contextlib.contextmanager
def made_anew(aside: Path) -> Iterator[None]:
    """Make `aside`, empty at first, while no other job makes one beside it."""
    aside.parent.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(aside.parent)
    try:
        restore_replaced(aside.parent)
        if aside.exists():  # what a crash left
            shutil.rmtree(aside)
        aside.mkdir()
        yield
    finally:
        unlock(lock)


class StrategyProgressCallback(ProgressCallback):
    """transformers' progress bar; `ended_metrics()` gives the iteration that it shows."""

    def __init__(self, ended_metrics: Callable[[], IterationMetrics | None]):
        super().__init__()
        self._ended_metrics = ended_metrics

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Override of transformers: without a terminal some lines in place of the bar."""
        self.current_step = 0
        if state.is_world_process_zero:
            self.training_bar = Progress(total=state.max_steps, dynamic_ncols=True)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Override of transformers, where somebody looks on."""
        if is_terminal(sys.stderr):
            super().on_prediction_step(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the last iteration whose end nobody has to wait for."""
        super().on_step_end(args, state, control, **kwargs)
        metrics = self._ended_metrics()
        if state.is_world_process_zero and metrics is not None:
            parts = [metrics.strategy, f"{metrics.tokens_per_s:,.0f} tokens/s"]
            if isfinite(metrics.tflops_per_device):
                parts.append(describe_flops(metrics.tflops_per_device, metrics.mfu))
            parts.append(f"loss {metrics.loss:.3f}")
            self.training_bar.set_postfix_str(" | ".join(parts))


class Counters:
    """Counts of training since some moment."""

    def __init__(self) -> None:
        self.num_iterations = self.num_sequences = self.num_tokens = 0
        self._ms = self._imbalance = self._tflop = self._mfu_ms = 0.0
        self._last: IterationMetrics | None = None

    def add(self, metrics: IterationMetrics) -> None:
        """Count one iteration, whose step an accelerator may still run."""
        self._add_times()
        self._last = metrics
        self.num_iterations += 1
        self.num_sequences += metrics.num_sequences
        self.num_tokens += metrics.num_tokens
        self._imbalance += metrics.imbalance

    def _add_times(self) -> None:
        """Count the times of the last iteration, for which the host waits."""
        if (metrics := self._last) is None:
            return
        self._last = None
        self._ms += metrics.iteration_ms
        self._tflop += metrics.tflops_per_device * metrics.iteration_ms
        self._mfu_ms += metrics.mfu * metrics.iteration_ms

    def summary(self) -> dict[str, float]:
        """Numbers for the log; without those that are not known."""
        self._add_times()
        numbers = {
            "tokens_per_second": round(self.num_tokens / self._ms * 1e3, 1),
            "tflops_per_device": float(f"{self._tflop / self._ms:.4g}"),
            "mfu": round(self._mfu_ms / self._ms, 4),
            "imbalance": round(self._imbalance / self.num_iterations, 4),
        }
        return {name: value for name, value in numbers.items() if isfinite(value)}
