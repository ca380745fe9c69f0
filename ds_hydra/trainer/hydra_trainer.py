"""HydraTrainer: the Trainer of transformers whose optimizer steps are `HydraEngine.train_batch`.

[Note: What stays and what changes]
The loop, callbacks, logging, schedules, checkpoints and saving are transformers' own. Replaced are
the batches (the engine draws and plans them, some iterations ahead), the training step, and
evaluation without `compute_metrics`. The overrides use names of transformers 5; a test compares
them with the installed version.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers.integrations.deepspeed import deepspeed_init
from transformers.trainer_utils import EvalLoopOutput

from ds_hydra.engine.initialize import no_launcher
from ds_hydra.engine.losses.loss import CrossEntropy
from ds_hydra.engine.model.held_models import check_free
from ds_hydra.errors import HydraConfigError
from ds_hydra.progress import say_once
from ds_hydra.sampler.data.batches import SamplerState, TokenBudgetSampler, budget_of
from ds_hydra.sampler.data.dataset import TokenDataset
from ds_hydra.sampler.data.stream import TokenStream
from ds_hydra.trainer import arguments, data
from ds_hydra.trainer.mixin import EngineMixin, say_nothing


class HydraTrainer(EngineMixin, transformers.Trainer):
    """A `transformers.Trainer` that trains with a parallel strategy chosen for every iteration.

    Takes `TrainingArguments(deepspeed=...)` with a DeepSpeed JSON that has a "hydra" section, and a
    `train_dataset`, or a stream and `max_steps`, of input_ids (with labels, `assistant_masks` or
    `completion_mask`), or of texts. One optimizer step trains on hydra.tokens_per_iteration tokens;
    batch sizes of TrainingArguments have no meaning. Raises HydraConfigError for arguments that
    would not be honoured.
    """

    _train_tokens: TokenDataset | TokenStream
    """Training data, from `get_train_dataloader` on, as `_epochs`."""
    _epochs: data.Epochs
    _row_losses: list[Tensor]
    """Losses of each step of an evaluation for logits, [rows, 2] (`data.losses_of_rows`)."""

    def __init__(self, model: Any = None, *args: Any, **kwargs: Any):
        if model is not None:
            check_free(model)
        super().__init__(model, *args, **kwargs)
        arguments.correct_best_metric(self.args, self._warn)
        self._reader = data.DatasetReader(self.args, self.hydra_config, self._warn)

    # ---- Configuration

    def _check_arguments(self) -> None:
        arguments.check_arguments(self.args, say_nothing)

    def _check_used(self, note: arguments.Note) -> None:
        arguments.check_arguments(self.args, note)
        arguments.check_overrides(self, others=arguments.find_set(self))
        arguments.check_data_collator(self.data_collator, note)

    # ---- Data

    def get_train_dataloader(self) -> DataLoader:
        """Global batches of the first epoch to look at, padded, each of all ranks; of a stream
        empty ones. The engine draws and packs them itself.
        """
        if self.train_dataset is None:
            raise HydraConfigError("train() needs a train_dataset; pass it to HydraTrainer")
        what = "train_dataset"
        self._begin_reading(what)
        stream = self._reader.find_stream(self.train_dataset, self.processing_class)
        if stream is not None:
            self._train_tokens, self._epochs = stream, data.StreamEpochs(self.args.max_steps)
            return DataLoader(data.Iterations(), batch_size=None)
        tokens = self._reader.read(self._choose_rows(), what, self.processing_class)
        self._train_tokens = tokens
        config = self.hydra_config
        sampler = TokenBudgetSampler(
            tokens.lengths,
            tokens.num_label_tokens,
            budget_of(tokens.lengths, config.tokens_per_iteration),
            seed=config.seed,
            shuffle=config.shuffle,
        )
        self._epochs = data.Epochs(
            sampler, len(tokens), limit=self.args.max_steps, device=self.args.device
        )
        batches = data.GlobalBatches(sampler, self._epochs)
        rows: Any = tokens
        return DataLoader(rows, batch_sampler=batches, collate_fn=self._pad_examples)

    def _choose_rows(self) -> Any:
        """The training rows: all, or those that an overridden _get_train_sampler draws."""
        if not arguments.is_overridden(self, "_get_train_sampler"):
            return self.train_dataset
        sampler = self._get_train_sampler(self.train_dataset)
        rows, shuffle = data.draw_train_rows(
            self.train_dataset, sampler, self.hydra_config, self.args.device, self._warn
        )
        self.hydra_config = self.hydra_config.model_copy(update={"shuffle": shuffle})
        return rows

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> Any:
        """Packed global batches for the engine, or transformers' loader if `compute_metrics` or an
        override wants logits.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise HydraConfigError(
                "evaluate() needs an eval_dataset; pass it to HydraTrainer or evaluate()"
            )
        if self._evaluates_packed():
            tokens = self._read(dataset, "eval_dataset")
            return data.EvalBatches(
                tokens, self.hydra_config.tokens_per_iteration, self._pad_examples
            )
        return self._padded_loader(dataset, "eval_dataset")

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        """transformers' loader: `predict` returns logits, for every row, also one above the
        context.
        """
        return self._padded_loader(test_dataset, "test_dataset")

    def _evaluates_packed(self) -> bool:
        """Whether nobody wants logits in evaluation."""
        is_own = arguments.is_overridden(self, "evaluation_loop", "prediction_step")
        return self.compute_metrics is None and not is_own

    def _padded_loader(self, dataset: Any, what: str) -> DataLoader:
        if not self.accelerator.even_batches and self.args.world_size > 1:
            raise HydraConfigError(
                "accelerator_config.even_batches is False: some ranks would have fewer rows for logits than others, "
                "whose passes and results wait for theirs; leave it out, rows that are added are not counted"
            )
        rows: Any = self._read(dataset, what, every_row=True)
        loader = self.accelerator.prepare(
            DataLoader(rows, batch_size=self.args.eval_batch_size, collate_fn=self._pad_examples)
        )
        del self.accelerator._dataloaders[-1:]  # where each evaluation's, and its rows, would stay
        return loader

    def _pad_examples(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        pad_token_id = getattr(self.processing_class, "pad_token_id", None) or 0
        return data.pad_examples(examples, pad_token_id)

    def _read(self, dataset: Any, what: str, *, every_row: bool = False) -> TokenDataset:
        self._begin_reading(what)
        return self._reader.read(dataset, what, self.processing_class, every_row=every_row)

    def _begin_reading(self, what: str) -> None:
        if "RANK" not in os.environ and not dist.is_initialized():
            raise no_launcher()
        kind = "train" if what == "train_dataset" else "eval"
        self._call_together(f"get_{kind}_dataloader()")  # scripts look at it on one rank
        self._reader.config = self.hydra_config

    # ---- Training

    def set_initial_training_values(self, args: Any, dataloader: DataLoader) -> tuple[Any, ...]:
        """Override of transformers: iterations are counted by drawing the global batches ahead; of
        a stream max_steps is their number.
        """
        if isinstance(self._train_tokens, TokenStream) and args.max_steps <= 0:
            return super().set_initial_training_values(args, dataloader)  # which says so
        return self._epochs.training_values(args.max_steps, args.num_train_epochs)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *args: Any
    ) -> tuple[int, int]:
        super()._init_training_state(max_steps, num_update_steps_per_epoch, *args)
        # Epochs may differ in their number of iterations
        epoch, into = self._epochs.find(self.state.global_step)
        return epoch, 0 if self.args.ignore_data_skip else into

    def _attach_data(self) -> None:
        self.engine.source.attach(self._train_tokens)

    def _prepare_for_training(
        self, max_steps: int, loader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        is_own = arguments.is_overridden(self, "evaluate", "get_eval_dataloader")
        if self.args.eval_strategy != "no" and not is_own:
            # A refusal at the first evaluation would end a run that has trained for hours.
            by_name = {"eval_dataset": self.eval_dataset}
            if isinstance(self.eval_dataset, dict):
                by_name = {f"eval_dataset[{name!r}]": d for name, d in self.eval_dataset.items()}
            for name, dataset in by_name.items():
                self._read(dataset, name, every_row=not self._evaluates_packed())
        prepared = super()._prepare_for_training(max_steps, loader, resume_from_checkpoint)
        if resume_from_checkpoint is not None and self.args.max_steps < 0:
            self._check_what_is_left(max_steps)
        self.engine.source.start()
        return prepared

    def _check_what_is_left(self, max_steps: int) -> None:
        """Raise HydraConfigError where the iterations of `num_train_epochs`, less those that the
        checkpoint counts, are not those that are left of the data.
        """
        sampler = self.engine.source.sampler
        assert sampler is not None, "data was attached"
        done, num_epochs = self.state.global_step, self.args.num_train_epochs
        left = self._epochs.iterations_from(sampler.state, num_epochs)
        counted = max(0, max_steps - done)
        # Of a checkpoint without a position, as the stock Trainer's, it begins again, too
        begins_again = sampler.state == SamplerState(iteration=sampler.state.iteration)
        begins_again |= self.args.ignore_data_skip
        is_exact = begins_again or float(num_epochs).is_integer()
        if abs(left - counted) <= (not is_exact):
            return
        problem = (
            f"num_train_epochs={num_epochs:g} is {max_steps} iterations of this data with "
            f"hydra.tokens_per_iteration {self.hydra_config.tokens_per_iteration}, and the checkpoint counts {done}: "
            f"{counted} would be trained of the {left} that are left; set max_steps={done + left} to train them"
        )
        if not (begins_again and counted):
            raise HydraConfigError(problem)
        self._warn(problem)

    def _run_epoch(self, **settings: Any) -> None:
        num_iterations = self._epochs.num_iterations(settings["epoch"])
        settings |= {"steps_in_epoch": num_iterations, "num_update_steps_per_epoch": num_iterations}
        settings["train_dataloader"] = DataLoader(data.Iterations(), batch_size=None)
        super()._run_epoch(**settings)
        if self.control.should_epoch_stop:
            say_once(
                "a callback has set control.should_epoch_stop: the next epoch begins here, but global batches go on "
                "where those of this one stopped, in the order of all rows; to leave rows out select them in "
                "train_dataset"
            )

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """One iteration of the engine, optimizer step included; `inputs` are empty. Returns the
        global loss.
        """
        if inputs:
            raise HydraConfigError(
                "training_step() trains on the global batch that the engine draws, and has got inputs; "
                "engine.train_batch(batch=examples) trains on those that are given"
            )
        model.train()  # callbacks may look
        loss = self.engine.train_batch(loss=self._own_loss())
        self._count_iteration()
        return loss.to(self.args.device)

    def _own_loss(self) -> CrossEntropy | None:
        """Loss with label_smoothing_factor as transformers smooths, also in evaluation."""
        if self.label_smoother is None:
            return None
        return CrossEntropy(label_smoothing=self.label_smoother.epsilon)

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
        if isinstance(dataloader, data.EvalBatches):
            self._check_used(say_nothing)
            with self._starting_engine():
                return self._evaluate_packed(dataloader, metric_key_prefix)
        self._row_losses = []
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        metrics, key = output.metrics, f"{metric_key_prefix}_loss"
        if key in metrics:
            # transformers' is the mean over rows; an overridden step has a loss of its own
            if self._row_losses and not arguments.is_overridden(self, "prediction_step"):
                loss_sum, num_label_tokens = torch.cat(self._row_losses).sum(dim=0).tolist()
                metrics[key] = loss_sum / num_label_tokens if num_label_tokens else math.nan
            metrics[f"{metric_key_prefix}_perplexity"] = _perplexity(metrics[key])
        return output

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the mean over label tokens of all ranks' padded batches, and keep the losses of
        their rows; evaluation alone calls it. Collective over all ranks.
        """
        outputs = model(**{k: v for k, v in inputs.items() if k not in ("labels", "skip_logits")})
        if not isinstance(outputs, Mapping):
            outputs = (None, *outputs)
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[1]
        smoothing = 0.0 if self.label_smoother is None else self.label_smoother.epsilon
        rows_N2 = data.losses_of_rows(logits, inputs["labels"], smoothing)
        # Without the rows that fill up the last batch
        rows_N2 = self.accelerator.gather_for_metrics(rows_N2)
        self._row_losses.append(rows_N2)
        loss_sum, num_label_tokens = rows_N2.sum(dim=0)
        loss = (loss_sum / num_label_tokens).float()
        return (loss, outputs) if return_outputs else loss

    def _evaluate_packed(self, batches: data.EvalBatches, prefix: str) -> EvalLoopOutput:
        if self.deepspeed is None:  # as transformers starts one, without optimizer
            deepspeed_init(self, num_training_steps=0, inference=True)
            self.model_wrapped = self.deepspeed = self.accelerator.prepare(self.model)
        self.model_wrapped.eval()  # callbacks may generate, without dropout
        self.callback_handler.eval_dataloader = batches
        loss_sum = 0.0
        for examples, num_label_tokens in batches.examples():
            loss = float(self.engine.eval_batch(examples, loss=self._own_loss()))
            loss_sum += loss * num_label_tokens
            self.control = self.callback_handler.on_prediction_step(
                self.args, self.state, self.control
            )
            self._end_if_asked()
        loss = loss_sum / int(batches.dataset.num_label_tokens.sum())
        metrics = {f"{prefix}_loss": loss, f"{prefix}_perplexity": _perplexity(loss)}
        return EvalLoopOutput(
            predictions=None, label_ids=None, metrics=metrics, num_samples=len(batches.dataset)
        )


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf  # exp(710) overflows
