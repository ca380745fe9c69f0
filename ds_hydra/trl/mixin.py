"""HydraMixin: a Trainer whose batches, loss and metrics stay as they are, and whose propagation is
the engine's; for DPO also the reference's scores of each sequence.

[Note: What TRL keeps]
Datasets, collators, samplers, batch sizes and accumulation, `compute_loss` with all its losses and
metrics, logs and callbacks are TRL's and transformers' own. The batches that the ranks' loaders
give for one optimizer step are one global batch of the engine, which plans it anew.

[Note: References of DPO]
The reference is a model with an engine of its own, the model with its adapters switched off, or
what the model said before training.

[Note: Arguments of TRL's trainers]
Checked are those that are refused and those without effect; a script that has no DeepSpeed
configuration gets one.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate.utils import DeepSpeedPlugin, gather_object, is_peft_model
from datasets import IterableDataset
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
from trl import BEMACallback, DPOTrainer, GRPOTrainer, SFTTrainer

from ds_hydra.configs import HydraConfig
from ds_hydra.engine import HydraEngine, hydra_engine_class
from ds_hydra.engine.losses.objective import Scores
from ds_hydra.engine.model.adapters import unwrap_adapters
from ds_hydra.engine.model.held_models import check_free
from ds_hydra.engine.ranks.agreement import gather_rows
from ds_hydra.errors import HydraConfigError
from ds_hydra.refusals import Refusal, each
from ds_hydra.trainer.arguments import (
    NOT_CALLED,
    Note,
    check_common_arguments,
    check_overrides,
)
from ds_hydra.trainer.mixin import EngineMixin, say_nothing
from ds_hydra.trl.scored_model import (
    Call,
    Given,
    ScoredModel,
    Sequences,
    read_sequences,
    score_everywhere,
    scored_now,
    train_everywhere,
    zero_scores,
)

Inputs = Mapping[str, Any]

_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
_ROWS_AT_ONCE = 64


class ReferenceMixin(EngineMixin):
    """Adds the reference's scores to the batches of a DPOTrainer, as its own precomputation does;
    nothing to those of others.
    """

    _known_references: dict[bytes, tuple[float, float]] | None = None
    """Known scores of pairs, where the reference is the model before training."""
    _datasets_to_score: Sequence[Any] = ()

    def _find_reference(self) -> None:
        """Let TRL read the reference from the batches from now on; after `__init__`."""
        if not isinstance(self, DPOTrainer):
            return
        self.precompute_ref_logps = True
        if self.ref_model is None and not is_peft_model(self.model):
            self._known_references = {}

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """`dataset` as it is: scored by the engine, as soon as it exists."""
        if self.args.precompute_ref_log_probs:
            if isinstance(dataset, IterableDataset):
                raise HydraConfigError(
                    f"precompute_ref_log_probs=True and the {name} dataset is an IterableDataset, whose rows are not "
                    "known before training; give a Dataset, or leave precompute_ref_log_probs out"
                )
            self._datasets_to_score = [*self._datasets_to_score, dataset]
        return dataset

    def _attach_data(self) -> None:
        """Score, with the model before training, sequences whose scores are needed later."""
        super()._attach_data()
        if self._known_references is None:
            return
        rank, num_ranks = self.args.process_index, self.args.world_size
        for dataset in self._datasets_to_score:
            for begin in range(0, len(dataset), _ROWS_AT_ONCE * num_ranks):
                rows = range(begin + rank, len(dataset), num_ranks)[:_ROWS_AT_ONCE]
                batch = self.data_collator([dataset[row] for row in rows]) if rows else None
                self._learn(self._prepare_input(batch))  # where TRL computes
        self._datasets_to_score = []  # a second train() starts from weights that are trained

    def _prepare_inputs(self, inputs: Inputs) -> Inputs:
        for engine in (self.engine, getattr(self, "ref_model", None)):
            if engine is not None:  # policies are what was sampled from
                engine.propagator.temperature = getattr(self, "temperature", None) or 1.0
        inputs = super()._prepare_inputs(inputs)
        if not isinstance(self, DPOTrainer):
            return inputs
        if self._known_references is None:
            model = self.engine if self.ref_model is None else self.ref_model
            found = self._ask(model, inputs)
        else:
            found = self._recall(inputs)
        return {**inputs, **dict(zip(_COLUMNS, found, strict=True))}

    def _ask(self, engine: HydraEngine, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Log-probabilities [pairs] of better and worse completions. Collective."""
        return self.compute_ref_log_probs(scored_now(engine), inputs)

    def _recall(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        assert self._known_references is not None
        names = _names_of_pairs(inputs)
        is_new = torch.tensor([any(n not in self._known_references for n in names)])
        if gather_rows(is_new.to(self.args.device)).any():
            if self.state.global_step:
                raise HydraConfigError(
                    "the batch has pairs that the reference has not seen before training, and there is no ref_model "
                    "any more: precompute_ref_log_probs=True keeps what the model said of train_dataset and "
                    "eval_dataset; give these pairs there, or leave precompute_ref_log_probs out"
                )
            self._learn(inputs)
        rows = [self._known_references[name] for name in names]
        better, worse = torch.tensor(rows, device=self.args.device).T
        return better, worse

    def _learn(self, inputs: Inputs | None) -> None:
        """Note the model's scores of the pairs of `inputs`, of those of all ranks. Collective."""
        assert self._known_references is not None
        mine: dict[bytes, tuple[float, float]] = {}
        if inputs is None:  # the others ask
            score_everywhere(self.engine, [])
        else:
            columns = [values.tolist() for values in self._ask(self.engine, inputs)]
            mine = dict(zip(_names_of_pairs(inputs), zip(*columns, strict=True), strict=True))
        for of_rank in gather_object([mine]):
            self._known_references |= of_rank


def _names_of_pairs(inputs: Inputs) -> list[bytes]:
    """One for each pair of a collated batch: a digest of its tokens, and which of them count."""
    columns = [inputs[name].cpu() for name in ("input_ids", "attention_mask", "completion_mask")]
    rows = []
    for ids, mask, counts in zip(*columns, strict=True):
        kept = torch.stack([ids, counts])[:, mask.bool()].to(torch.int64).numpy()
        rows.append(hashlib.blake2b(kept.tobytes(), digest_size=16).digest())
    half = len(rows) // 2
    return [better + worse for better, worse in zip(rows[:half], rows[half:], strict=True)]


def remove_fused_head(model: nn.Module) -> None:
    """Take away the forward that TRL sets on `model`, which the engine does not run."""
    inner = model.get_base_model() if is_peft_model(model) else model
    code = getattr(getattr(vars(inner).get("forward"), "__func__", None), "__code__", None)
    if code is not None and code.co_name == "_fused_forward":
        del inner.forward


@contextlib.contextmanager
def reference_engines(config: HydraConfig) -> Iterator[None]:
    """Let TRL's `prepare_deepspeed` make a HydraEngine of a reference model inside. Of a reward
    model, which has no head over tokens, it makes an engine of DeepSpeed's own.
    """
    quiet = config.model_copy(update={"run_dir": None})
    with hydra_engine_class(quiet):
        kind = deepspeed.DeepSpeedEngine

        def new(cls: Any, model: nn.Module, **kwargs: Any) -> Any:
            if model.get_output_embeddings() is not None:
                return kind.__new__(cls)
            kwargs["config_class"]._param_dict.pop("hydra", None)
            return DeepSpeedEngine(model=model, **kwargs)

        def init(self: Any, model: nn.Module, **kwargs: Any) -> None:
            remove_fused_head(model)
            kind.__init__(self, model=model, **kwargs)

        members: dict[str, Any] = {"__new__": new, "__init__": init}
        deepspeed.DeepSpeedEngine = type(kind.__name__, (kind,), members)
        yield


_PLACES = ("attention_mask", "position_ids")


class HydraMixin(ReferenceMixin):
    """A Trainer of TRL on HydraEngine: `class Mine(HydraMixin, SFTTrainer)`.

    Takes what the Trainer takes. The DeepSpeed JSON, and its "hydra" section, may be left out. What
    would not be honoured is refused by name (HydraConfigError) before a model is loaded.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        check_trainer(type(self))
        for given in (*args, *kwargs.values()):
            if isinstance(given, TrainingArguments):
                check_trl_arguments(given, say_nothing)
                add_deepspeed(given)
        model = kwargs.get("model", args[0] if args else None)
        if isinstance(model, nn.Module):
            check_free(model)
        self._pending: list[Inputs] = []
        with contextlib.ExitStack() as self._references:
            super().__init__(*args, **kwargs)
        remove_fused_head(self.model)
        self._find_reference()
        # The engine adds the loss of balance of experts. If the configuration
        # asked for it, generation would add one, too, of masks that do not fit
        is_set = getattr(self.args, "router_aux_loss_coef", None) is not None
        if is_set or getattr(self, "aux_loss_enabled", False):
            model = unwrap_adapters(self.model)
            model.output_router_logits = self.aux_loss_enabled
            model.router_aux_loss_coef = self.router_aux_loss_coef
        self.aux_loss_enabled = False

    # ---- Configuration

    def create_accelerator_and_postprocess(self) -> None:
        """Override of transformers, with DeepSpeed."""
        add_deepspeed(self.args)
        super().create_accelerator_and_postprocess()
        self._references.enter_context(reference_engines(self.hydra_config))

    def _check_arguments(self) -> None:
        check_trl_arguments(self.args, say_nothing)

    def _complete_config(self, ds_config: dict[str, Any]) -> None:
        complete_section(ds_config, self.args, self.model)

    def _check_used(self, note: Note) -> None:
        check_trl_arguments(self.args, note)
        check_overrides(self, NOT_CALLED_OF_TRL)
        if any(isinstance(callback, BEMACallback) for callback in self.callback_handler.callbacks):
            raise HydraConfigError(
                "BEMACallback loads the state_dict() of the model, whose weights ZeRO-3 has in shards (on stock "
                "DeepSpeed, too); leave it out"
            )
        if self.compute_loss_func is not None:
            raise HydraConfigError(
                f"compute_loss_func is {self.compute_loss_func!r}, which gets logits, and no rank holds those of a "
                "sequence; override compute_loss(), and call model(**inputs, labels=labels, fused_lm_head=True)"
            )

    # ---- Training

    def _is_linear(self) -> bool:
        """Whether the loss is linear in log-probabilities, so that no pass before tells its
        derivatives.
        """
        return (
            isinstance(self, SFTTrainer)
            and type(self).compute_loss is SFTTrainer.compute_loss
            and self.args.loss_type == "nll"
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Override of transformers."""
        self._pending.clear()
        return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None
    ) -> Tensor:
        """Keeps `inputs`; with the last ones of an optimizer step one iteration of the engine,
        whose loss it returns: the mean over ranks.
        """
        start = time.perf_counter()
        model.train()
        self._pending.append(self._prepare_inputs(inputs))
        if self.accelerator.gradient_state.sync_gradients:
            loss = self._train_pending(num_items_in_batch)
        else:
            loss = torch.zeros((), dtype=torch.float32, device=self.args.device)
        if hasattr(self, "_step"):
            self._count_step_of_policy(time.perf_counter() - start)
        return loss

    def _count_step_of_policy(self, seconds: float) -> None:
        """Count a step as the training_step of trainers of policies does, which is not called."""
        self._step += 1
        self._current_train_step_time += seconds
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0

    def _train_pending(self, num_items_in_batch: Any) -> Tensor:
        batches, self._pending = self._pending, []
        step = self._linear_step if self._is_linear() else self._scored_step
        loss = step(batches, num_items_in_batch)
        self._count_iteration()
        return loss

    def _scored_step(self, batches: Sequence[Inputs], num_items: Any) -> Tensor:
        """Any loss: scores first, then the gradient that they give it."""
        found = [self._sequences_of(batch) for batch in batches]
        ids = [ids for s in found for ids in s.ids]
        scores = score_everywhere(self.engine, ids, noise=True)
        model = ScoredModel(self.engine, Given(self.engine, found, scores))
        loss = self._sum_of_losses(model, batches, num_items)
        self._train(model.calls, loss)
        return gather_rows(loss.detach().reshape(1)).mean()

    def _linear_step(self, batches: Sequence[Inputs], num_items: Any) -> Tensor:
        """A loss whose derivatives are the same everywhere: no scores are needed before, and what
        the one pass finds is for the metrics.
        """
        smoother, self.label_smoother = self.label_smoother, None
        try:
            model = ScoredModel(self.engine, zero_scores)
            with self._without_metrics():
                loss = self._sum_of_losses(model, batches, num_items)
            smoothing = 0.0 if smoother is None else smoother.epsilon
            value, scores = self._train(model.calls, loss, label_smoothing=smoothing)
            known = Given(self.engine, (call.sequences for call in model.calls), scores)
            with torch.no_grad():
                self._sum_of_losses(ScoredModel(self.engine, known), batches, num_items)
        finally:
            self.label_smoother = smoother
        return torch.tensor(value, dtype=torch.float32, device=self.args.device)

    def _sum_of_losses(
        self, model: ScoredModel, batches: Sequence[Inputs], num_items: Any
    ) -> Tensor:
        """Sum over the batches of an optimizer step, scaled as transformers scales each of them."""
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = self.model_accepts_loss_kwargs and num_items is not None
        divisor = 1 if is_scaled else self.current_gradient_accumulation_steps
        losses = []
        for number, batch in enumerate(batches, start=1):
            self.accelerator.sync_gradients = number == len(batches)  # compute_loss may look
            loss = self.compute_loss(model, dict(batch), num_items_in_batch=num_items)
            losses.append(loss / divisor)
        return torch.stack(losses).sum()

    def _train(
        self, calls: Sequence[Call], loss: Tensor, *, label_smoothing: float | None = None
    ) -> tuple[float, Scores | None]:
        """One iteration with the derivatives of this rank's `loss`, of which DeepSpeed trains the
        mean over ranks.
        """
        if loss.requires_grad:
            loss.backward()
        ids = [ids for call in calls for ids in call.sequences.ids]
        weights: list[Tensor] = []
        entropy_weights: list[Tensor] = []
        for call in calls:
            by_log_prob, by_entropy = call.weights(1 / self.args.world_size)
            weights += by_log_prob
            entropy_weights += by_entropy
        return train_everywhere(
            self.engine,
            ids,
            weights,
            entropy_weights,
            label_smoothing=label_smoothing or 0.0,
            keep_scores=label_smoothing is not None,
        )

    def _sequences_of(self, batch: Inputs) -> Sequences:
        """The sequences that compute_loss will ask the model for."""
        if "completion_ids" in batch:
            parts = (("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask"))
            ids, mask = (torch.cat([batch[name] for name in names], dim=1) for names in parts)
            return Sequences.read(ids, mask)
        return read_sequences(
            {name: batch[name] for name in ("input_ids", *_PLACES) if name in batch}
        )

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **more: Any,
    ) -> Any:
        """Score rollouts as trainers of policies do, but all of them at once, planned together."""
        if not isinstance(model, ScoredModel):
            model = scored_now(model if isinstance(model, HydraEngine) else self.engine)
        given = (model, input_ids, attention_mask, logits_to_keep)
        return super()._get_per_token_logps_and_entropies(*given, None, **more)

    @contextlib.contextmanager
    def _without_metrics(self) -> Iterator[None]:
        """Forget metrics that compute_loss notes inside."""
        names = [name for name in ("_metrics", "_total_train_tokens") if hasattr(self, name)]
        before = {name: copy.deepcopy(getattr(self, name)) for name in names}
        yield
        for name, value in before.items():
            setattr(self, name, value)

    def floating_point_ops(self, inputs: Inputs) -> float:
        """FLOPs as HydraTrainer counts them, once for each iteration."""
        is_trained = self.accelerator.gradient_state.sync_gradients
        return super().floating_point_ops(inputs) if is_trained else 0.0

    def _track_num_input_tokens(self, inputs: Inputs) -> None:
        if self.accelerator.gradient_state.sync_gradients:
            super()._track_num_input_tokens(inputs)

    # ---- Evaluation

    def prediction_step(self, model: nn.Module, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
        """Override of the Trainer, on scores."""
        return super().prediction_step(scored_now(self.engine), inputs, *args, **kwargs)

    # ---- Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        name = self.args.hub_model_id or Path(self.args.output_dir).name
        self.create_model_card(model_name=name.split("/")[-1])
        super()._save_checkpoint(model, trial)

    def _write_checkpoint(self, folder: str) -> None:
        super()._write_checkpoint(folder)
        if getattr(self, "use_adaptive_entropy", False) and self.args.should_save:
            names = {"entropy_coef": "entropy_coef", "last_world_entropy": "_last_world_entropy"}
            state = {key: getattr(self, name) for key, name in names.items()}
            Path(folder, "entropy_ctrl_state.json").write_text(json.dumps(state))


class HydraSFTTrainer(HydraMixin, SFTTrainer):
    """TRL's SFTTrainer on HydraEngine."""


class HydraDPOTrainer(HydraMixin, DPOTrainer):
    """TRL's DPOTrainer on HydraEngine."""


class HydraGRPOTrainer(HydraMixin, GRPOTrainer):
    """TRL's GRPOTrainer on HydraEngine, with rollouts from outside: `rollout_func`, or vLLM."""


OF_THE_LOOP = frozenset(
    (
        "gradient_accumulation_steps", "per_device_train_batch_size", "train_sampling_strategy",
        "average_tokens_across_devices", "dataloader_drop_last", "dataloader_num_workers",
        "dataloader_prefetch_factor", "dataloader_persistent_workers",
        "dataloader_multiprocessing_context", "dataloader_in_order",
    )
)  # fmt: skip
"""Arguments of transformers that HydraTrainer refuses or reports, and that are honoured here."""

REFUSED = (
    Refusal(
        "activation_offloading",
        "layers are checkpointed; set gradient_checkpointing=True (hydra.activation_checkpointing) instead",
    ),
    Refusal(
        "use_weighting",
        "its weights need the sum of squared probabilities, which is not computed; leave it out",
    ),
    Refusal(
        "cast_lm_head_to_fp32",
        "log-probabilities are computed in fp32 from the logits of the model's dtype; leave it out",
    ),
)
"""Fields of TRL's configurations that would change training."""

DS_CONFIG = {
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 1_000_000_000,
    "hydra": {},
}
"""Value of `TrainingArguments(deepspeed=...)` where a script gives none; the optimizer is the
Trainer's.
"""


_SAID_BY_LAUNCHER = ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_DEEPSPEED_ZERO_STAGE")


def add_deepspeed(args: TrainingArguments) -> None:
    """Let `args` use DeepSpeed, where neither they nor `accelerate launch` say how."""
    if args.deepspeed is not None or any(name in os.environ for name in _SAID_BY_LAUNCHER):
        return
    args.deepspeed = copy.deepcopy(DS_CONFIG)
    args.hf_deepspeed_config = HfTrainerDeepSpeedConfig(args.deepspeed)
    args.hf_deepspeed_config.trainer_config_process(args)
    args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=args.hf_deepspeed_config)


def complete_section(ds_config: dict[str, Any], args: TrainingArguments, model: Any) -> None:
    """Add the settings of `args` and `model` to the "hydra" section, and accumulation, which is
    done here.
    """
    ds_config["gradient_accumulation_steps"] = 1
    section = dict(ds_config.get("hydra") or {})
    longest = getattr(args, "max_length", None)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    known = [length for length in (longest, positions) if length]
    if "context_length" not in section:
        if not known:
            raise HydraConfigError(
                "how long sequences may get is not known: neither max_length nor the model say it; set "
                'hydra.context_length in the DeepSpeed JSON, such as "hydra": {"context_length": 4096}'
            )
        section["context_length"] = min(known)
    num_examples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    section.setdefault("tokens_per_iteration", section["context_length"] * num_examples)
    ds_config["hydra"] = section


_HANDLED = ("SFTTrainer", "DPOTrainer", "GRPOTrainer", "RLOOTrainer")


def check_trainer(kind: type) -> None:
    """Raise HydraConfigError for a trainer of TRL that does not run on the engine's scores: it asks
    the model for logits, hidden states or a teacher, or trains a model of another kind.
    """
    base = next((k for k in kind.__mro__ if k.__module__.partition(".")[0] == "trl"), None)
    if base is not None and (base.__name__ not in _HANDLED or "experimental" in base.__module__):
        raise HydraConfigError(
            f"{kind.__name__} is a {base.__name__} of {base.__module__.rpartition('.')[0]}, which ds_hydra.trl "
            f"does not run; it runs {', '.join(_HANDLED)} of TRL. For another loss on token log-probabilities call "
            "engine.train_batch(batch, loss=...) with one of ds_hydra.losses or your own, or train with TRL on plain "
            'ZeRO-3, without HydraMixin and the "hydra" section'
        )


NOT_CALLED_OF_TRL = (
    *each(
        "compute_loss_context_manager autocast_smart_context_manager _prepare_context_parallel_inputs",
        "passes of training run inside the engine, in the dtype of the DeepSpeed JSON; leave it out",
    ),
    *(row for row in NOT_CALLED if row.name == "create_optimizer_and_scheduler"),
)
"""Methods that stock trainers of TRL call in training and those on HydraMixin do not."""


def check_trl_arguments(args: TrainingArguments, note: Note) -> None:
    """Raise HydraConfigError for settings not honoured; `note` those without effect."""
    problems = (row.find_problem(getattr(args, row.name, None)) for row in REFUSED)
    check_common_arguments(args, note, problems=filter(None, problems), honoured=OF_THE_LOOP)
