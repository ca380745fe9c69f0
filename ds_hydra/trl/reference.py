"""The reference of DPO under the engine: a model with an engine of its own, the adapters switched
off, or what the model said before training.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
from accelerate.utils import gather_object, is_peft_model
from torch import Tensor, nn
from trl import DPOTrainer

from ds_hydra.configs import HydraConfig
from ds_hydra.engine import HydraEngine, hydra_engine_class
from ds_hydra.engine.ranks.agreement import gather_rows
from ds_hydra.errors import HydraConfigError
from ds_hydra.trainer.mixin import EngineMixin
from ds_hydra.trl.everywhere import score_everywhere
from ds_hydra.trl.scored_model import scored_now

Inputs = Mapping[str, Any]

_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
_ROWS_AT_ONCE = 64


class ReferenceMixin(EngineMixin):
    """Adds what the reference says to the batches of a DPOTrainer, as its own precomputation does;
    nothing to those of others.
    """

    _known_references: dict[bytes, tuple[float, float]] | None = None
    """For pairs, where the reference is the model before training."""
    _datasets_to_score: Sequence[Any] = ()

    def _find_reference(self) -> None:
        """After `__init__`: TRL reads the reference from the batches from now on."""
        if not isinstance(self, DPOTrainer):
            return
        self.precompute_ref_logps = True
        if self.ref_model is None and not is_peft_model(self.model):
            self._known_references = {}

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """`dataset` as it is: scored by the engine, as soon as it exists."""
        self._datasets_to_score = [*self._datasets_to_score, dataset]
        return dataset

    def _attach_data(self) -> None:
        """Score, with the model as it is before training, what shall be known of it later."""
        super()._attach_data()
        if self._known_references is None:
            return
        rank, num_ranks = self.args.process_index, self.args.world_size
        for dataset in self._datasets_to_score:
            for begin in range(0, len(dataset), _ROWS_AT_ONCE * num_ranks):
                rows = range(begin + rank, len(dataset), num_ranks)[:_ROWS_AT_ONCE]
                self._learn(self.data_collator([dataset[row] for row in rows]) if rows else None)

    def _prepare_inputs(self, inputs: Inputs) -> Inputs:
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
        """Note what the model says of the pairs of `inputs`, of those of all ranks. Collective."""
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
    """While open, TRL's `prepare_deepspeed` makes a HydraEngine of a reference model."""
    quiet = config.model_copy(update={"run_dir": None})
    with hydra_engine_class(quiet):
        kind = deepspeed.DeepSpeedEngine

        def init(self: Any, args: Any, model: nn.Module, *more: Any, **kwargs: Any) -> None:
            remove_fused_head(model)
            kind.__init__(self, args, model, *more, **kwargs)

        deepspeed.DeepSpeedEngine = type(kind.__name__, (kind,), {"__init__": init})
        yield
