"""HydraTrainer: the Trainer of transformers whose optimizer steps are `HydraEngine.train_batch`.

[Note: What stays and what changes]
The loop, callbacks, logging, schedules, checkpoints and saving are transformers' own. Replaced are
the batches (the engine draws and plans them, some iterations ahead), the training step, and
evaluation without `compute_metrics`. The overrides use names of transformers 5; a test compares
them with the installed version.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from pathlib import Path
from typing import Any, NoReturn

import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers.integrations.deepspeed import deepspeed_init, deepspeed_load_checkpoint
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, rotate_checkpoints

from ds_hydra.configs import HydraConfig, read_ds_config
from ds_hydra.engine import HydraEngine, hydra_engine_class
from ds_hydra.engine.hydra_engine import check_model
from ds_hydra.engine.model.adapters import unify_adapter_dtype, unwrap_adapters
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.data.batches import TokenBudgetSampler
from ds_hydra.sampler.data.dataset import TokenDataset
from ds_hydra.trainer.arguments import (
    Note,
    check_arguments,
    check_data_collator,
    check_elsewhere,
    drop_batch_size_mismatches,
    map_arguments,
    read_loss_option,
)
from ds_hydra.trainer.checkpoints import restore_checkpoints, written_aside
from ds_hydra.trainer.data import (
    Epochs,
    EvalBatches,
    IterationLoader,
    TokenRows,
    pad_examples,
)
from ds_hydra.trainer.overrides import check_overrides, is_overridden
from ds_hydra.trainer.progress import Counters, StrategyProgressCallback
from ds_hydra.trainer.reading import DatasetReader, draw_train_rows

logger = logging.getLogger(__name__)


def _say_nothing(_message: str) -> None:
    """In place of a warning that has been shown already."""


class HydraTrainer(transformers.Trainer):
    """A `transformers.Trainer` that trains with a parallel strategy chosen for every iteration.

    Takes `TrainingArguments(deepspeed=...)` with a DeepSpeed JSON that has a "hydra" section, and a
    `train_dataset` whose lengths can be known: input_ids (with labels, `assistant_masks` or
    `completion_mask`), texts, chats (`messages`), or `prompt` and `completion`. One optimizer step
    trains on hydra.tokens_per_iteration tokens; batch sizes of TrainingArguments have no meaning.

    `completion_only_loss` (default: for `prompt` and `completion`) and `assistant_only_loss` say
    which tokens of a conversation count, as in TRL. Raises HydraConfigError for arguments that
    would not be honoured.
    """

    def __init__(
        self,
        model: Any = None,
        *args: Any,
        completion_only_loss: bool | None = None,
        assistant_only_loss: bool | None = None,
        **kwargs: Any,
    ):
        check_elsewhere(kwargs)
        if model is not None:
            check_model(model)
        self._train_tokens: TokenDataset | None = None
        self._epochs: Epochs | None = None
        self._trained, self._since_log = Counters(), Counters()
        super().__init__(model, *args, **kwargs)
        self._reader = DatasetReader(
            self.args,
            self.hydra_config,
            completion_only_loss=read_loss_option(
                self.args, "completion_only_loss", completion_only_loss
            ),
            assistant_only_loss=bool(
                read_loss_option(self.args, "assistant_only_loss", assistant_only_loss)
            ),
        )
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise HydraConfigError(
                "optimizers is given, which transformers does not use with DeepSpeed; leave it out and pass "
                "optimizer_cls_and_kwargs, or override create_optimizer() or create_scheduler()"
            )
        self._check_used(self._warn)
        self._show_strategy_in_progress_bar()

    # ---- Configuration

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers; reads and validates the "hydra" section, and fills in what ds_hydra
        needs around it.
        """
        check_arguments(self.args, _say_nothing)  # before transformers acts on them
        super().create_accelerator_and_postprocess()
        if not self.is_deepspeed_enabled:
            raise HydraConfigError(
                "HydraTrainer needs DeepSpeed: pass TrainingArguments(deepspeed='ds_config.json'), or start with "
                "accelerate launch --use_deepspeed"
            )
        num_ranks = int(os.environ.get("WORLD_SIZE", 1))
        if self.args.world_size != num_ranks:  # each rank would take itself for the first
            raise HydraConfigError(
                f"transformers counts {self.args.world_size} ranks, the launcher started {num_ranks}; on CPU pass "
                "TrainingArguments(use_cpu=True)"
            )
        hf_config = self.accelerator.state.deepspeed_plugin.hf_ds_config
        drop_batch_size_mismatches(hf_config)
        filled_in, hydra = read_ds_config(hf_config.config)
        # In place: transformers and accelerate hold the same object. DeepSpeed ignores the "hydra"
        # section.
        hf_config.config.update(filled_in)
        self.hydra_config: HydraConfig = map_arguments(self.args, hydra, self._warn)

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

    def _check_used(self, note: Note) -> None:
        """Refuse what would be dropped; again before training, because all of it can be set."""
        check_arguments(self.args, note)
        check_overrides(self, HydraTrainer)
        check_data_collator(self.data_collator, note)

    def _show_strategy_in_progress_bar(self) -> None:
        shown = self.callback_handler.pop_callback(ProgressCallback)
        if shown is not None and type(shown) is ProgressCallback:
            shown = StrategyProgressCallback(lambda: self.deepspeed and self.engine.last_metrics)
        if shown is not None:
            self.callback_handler.add_callback(shown)

    # ---- Data

    def get_train_dataloader(self) -> DataLoader:
        """A loader that only counts iterations: the engine draws the mini-batches itself."""
        if self.train_dataset is None:
            raise HydraConfigError("train() needs a train_dataset; pass it to HydraTrainer")
        tokens = self._train_tokens = self._read(self._choose_rows(), "train_dataset")
        config = self.hydra_config
        sampler = TokenBudgetSampler(
            tokens.lengths,
            tokens.num_label_tokens,
            config.tokens_per_iteration,
            seed=config.seed,
            shuffle=config.shuffle,
        )
        self._epochs = Epochs(
            sampler, len(tokens), limit=self.args.max_steps, device=self.args.device
        )
        return IterationLoader(self._epochs)

    def _choose_rows(self) -> Any:
        """The training rows: all, or those that an overridden _get_train_sampler draws."""
        if not is_overridden(self, "_get_train_sampler", HydraTrainer):
            return self.train_dataset
        sampler = self._get_train_sampler(self.train_dataset)
        rows, shuffle = draw_train_rows(
            self.train_dataset, sampler, self.hydra_config, self.args.device, self._warn
        )
        self.hydra_config = self.hydra_config.model_copy(update={"shuffle": shuffle})
        return rows

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> Any:
        """Packed mini-batches for the engine, or transformers' loader if `compute_metrics` or an
        override wants logits.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise HydraConfigError(
                "evaluate() needs an eval_dataset; pass it to HydraTrainer or evaluate()"
            )
        if self.compute_metrics is None and not self._has_own_evaluation():
            return EvalBatches(
                self._read(dataset, "eval_dataset"), self.hydra_config.tokens_per_iteration
            )
        return self._padded_loader(dataset, "eval_dataset")

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        """transformers' loader: `predict` returns logits."""
        return self._padded_loader(test_dataset, "test_dataset")

    def _has_own_evaluation(self) -> bool:
        return any(
            is_overridden(self, name, HydraTrainer)
            for name in ("evaluation_loop", "prediction_step")
        )

    def _padded_loader(self, dataset: Any, what: str) -> DataLoader:
        rows = TokenRows(self._read(dataset, what))
        pad_token_id = getattr(self.processing_class, "pad_token_id", None) or 0
        collate = functools.partial(pad_examples, pad_token_id=pad_token_id)
        return self.accelerator.prepare(
            DataLoader(rows, batch_size=self.args.eval_batch_size, collate_fn=collate)
        )

    def _read(self, dataset: Any, what: str) -> TokenDataset:
        return self._reader.read(dataset, what, self.processing_class)

    # ---- Training

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers; a second time only with `model_init`, because DeepSpeed cannot start a
        second engine on a model.
        """
        self._check_used(_say_nothing)
        if self.deepspeed is not None:
            if self.model_init is None:
                raise HydraConfigError(
                    "this HydraTrainer has trained or evaluated already, and DeepSpeed cannot start an engine on its "
                    "model again; make a new model and a new HydraTrainer, or pass model_init in place of model (to "
                    "evaluate before the first step set eval_on_start=True)"
                )
            self.accelerator.free_memory()  # destroys the engine
            self.deepspeed = None
        if resume_from_checkpoint is True:
            restore_checkpoints(
                Path(self.args.output_dir), commits=self.args.should_save, device=self.args.device
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: DataLoader) -> tuple[Any, ...]:
        """As transformers; iterations are counted by drawing the mini-batches ahead."""
        assert self._epochs is not None, "get_train_dataloader has drawn"
        return self._epochs.training_values(args.max_steps, args.num_train_epochs)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *args: Any
    ) -> tuple[int, int]:
        super()._init_training_state(max_steps, num_update_steps_per_epoch, *args)
        assert self._epochs is not None
        # Epochs may differ in their number of iterations
        return self._epochs.find(self.state.global_step)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        unify_adapter_dtype(self.model, self._warn)
        with hydra_engine_class(self.hydra_config):
            model, train_dataloader = super()._prepare_for_training(
                max_steps, train_dataloader, None
            )
        self.engine.hydra.attach_data(self._train_tokens)
        # After the data, whose position is in the checkpoint
        if resume_from_checkpoint is not None:
            is_whole = unwrap_adapters(self.model) is self.model
            deepspeed_load_checkpoint(
                self.engine, resume_from_checkpoint, load_module_strict=is_whole
            )
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
        self.engine.hydra.start_planning()
        self._trained, self._since_log = Counters(), Counters()
        return model, train_dataloader

    def _run_epoch(self, **settings: Any) -> None:
        assert self._epochs is not None
        num_iterations = self._epochs.num_iterations(settings["epoch"])
        settings |= {"steps_in_epoch": num_iterations, "num_update_steps_per_epoch": num_iterations}
        super()._run_epoch(**settings)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """One iteration of the engine, optimizer step included; `inputs` are empty. Returns the
        global loss.
        """
        loss = self.engine.train_batch()
        for counters in (self._trained, self._since_log):
            counters.add(self.engine.last_metrics)
        return loss.to(self.args.device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As transformers, for evaluation with `compute_metrics` and `predict`."""
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> Any:
        steps = self.state.global_step - self._initial_global_step
        exact = self._trained.num_sequences * self.state.max_steps / max(steps, 1)
        output = super()._finalize_training(trial, exact, start_time)
        self.engine.hydra.close_feed()
        return output

    # ---- Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As transformers, written aside: `checkpoint-N` is there when all ranks have written."""
        state, args = self.state, self.args
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if trial is None:
            self.store_flos()
        if state.best_global_step:
            best = folder.with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best == folder or best.exists():
                state.best_model_checkpoint = str(best)
        commits = args.should_save or (
            args.local_process_index == 0 and self.engine.use_node_local_storage()
        )
        with written_aside(folder, commits=commits, device=args.device) as aside:
            self._write_checkpoint(str(aside))
        if args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if args.should_save:
            rotate_checkpoints(
                output_dir=str(folder.parent),
                save_total_limit=args.save_total_limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=True,
            )

    def _write_checkpoint(self, folder: str) -> None:
        self.save_model(folder, _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(folder)
            self._save_scaler(folder)
            self._save_rng_state(folder)
        if self.args.should_save:
            self._note_callbacks()
            self.state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))

    def _note_callbacks(self) -> None:
        """Put what callbacks carry over a resume into the state, as transformers."""
        stateful = self.state.stateful_callbacks
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(stateful[name], list):
                    stateful[name].append(callback.state())
                else:
                    stateful[name] = callback.state()

    def hyperparameter_search(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused: it starts several engines in one process."""
        raise HydraConfigError(
            "hyperparameter_search() is not supported, because DeepSpeed cannot start several engines on a model "
            "in one process; start one run per trial"
        )

    # ---- Logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As transformers; with the loss come tokens/s and the pipelines' imbalance since the last
        log.
        """
        if "loss" in logs and self._since_log.num_iterations:
            logs |= self._since_log.summary()
            self._since_log = Counters()
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> float:
        """6 x tokens x parameters outside of the embedding, this rank's share (transformers sums
        over ranks).
        """
        stage_model = self.engine.hydra.stage_model
        num_params = (
            sum(spec.numel for spec in stage_model.specs)
            - stage_model.vocab_size * stage_model.hidden_size
        )
        return 6 * self.engine.last_metrics.num_tokens * num_params / self.args.world_size

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += self.engine.last_metrics.num_tokens

    # ---- Evaluation

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Loss over all label tokens and perplexity, on packed micro-batches; transformers' own
        loop where logits are wanted.
        """
        self._check_used(_say_nothing)
        with hydra_engine_class(self.hydra_config):  # evaluation before training starts an engine
            if isinstance(dataloader, EvalBatches):
                return self._evaluate_packed(dataloader, metric_key_prefix)
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        if (loss := output.metrics.get(f"{metric_key_prefix}_loss")) is not None:
            output.metrics[f"{metric_key_prefix}_perplexity"] = _perplexity(loss)
        return output

    def _evaluate_packed(self, batches: EvalBatches, prefix: str) -> EvalLoopOutput:
        if self.deepspeed is None:  # as transformers starts one, without optimizer
            deepspeed_init(self, num_training_steps=0, inference=True)
            self.model_wrapped = self.deepspeed = self.accelerator.prepare(self.model)
        self.callback_handler.eval_dataloader = batches
        loss_sum = 0.0
        for examples, num_label_tokens in batches:
            loss_sum += float(self.engine.eval_batch(examples)) * num_label_tokens
            self.control = self.callback_handler.on_prediction_step(
                self.args, self.state, self.control
            )
        loss = loss_sum / batches.num_label_tokens
        metrics = {f"{prefix}_loss": loss, f"{prefix}_perplexity": _perplexity(loss)}
        return EvalLoopOutput(
            predictions=None, label_ids=None, metrics=metrics, num_samples=len(batches.dataset)
        )


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf  # exp(710) overflows
