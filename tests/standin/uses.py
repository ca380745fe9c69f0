"""What users do with an engine beside training it, on stand-in ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import VOCAB_SIZE, tiny
from single_process import (
    random_examples,
    token_mean_gradients,
)
from test_engine_parity import LENGTHS

from standin.checks import SHORT, observed, start
from standin.streams import observer


def _shared_folder() -> Path:
    """A new folder, the same on all ranks."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, 0, device=torch.device("standin", 0))
    return Path(str(made[0]))


def evaluation() -> dict[str, Any]:
    """Losses of `eval_batch` under several strategies, and what the device saw."""
    engine = start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    with observed() as found:
        found["losses"] = [float(engine.eval_batch(examples, strategy=s)) for s in SHORT]
    found["wanted"] = token_mean_gradients(tiny("llama"), examples)[0]
    return found


def checkpoints() -> dict[str, Any]:
    """Losses after a checkpoint, and those of another engine that has loaded it."""
    folder = str(_shared_folder())
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    first, second = start("llama"), None
    with observed() as found:
        first.train_batch(examples, strategy="2x<1,1>")
        first.save_checkpoint(folder)
        found["saved"] = [float(first.train_batch(examples, strategy=s)) for s in SHORT]
        second = start("llama")
        second.load_checkpoint(folder)
        found["loaded"] = [float(second.train_batch(examples, strategy=s)) for s in SHORT]
    return found


def trainer() -> dict[str, Any]:
    """Losses of HydraTrainer, of a run that goes on from its checkpoint, and of an evaluation.

    Accelerate knows no device of this kind, so it is told which one it is, and that ranks talk
    through its backend.
    """
    import datasets
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from test_trainer import prepare, rows, small_model, training_arguments
    from transformers import TrainerCallback

    from ds_hydra import HydraTrainer

    steps: list[Counter[str]] = []

    class Waits(TrainerCallback):
        """What the host waits for from one step's beginning to the next one's, logs included."""

        def on_step_begin(self, *_args: Any, **_more: Any) -> None:
            steps.append(Counter(observer.waits))

    folder = _shared_folder()
    prepare(folder)
    data = datasets.Dataset.from_list(rows())
    backend = ("standin", DistributedType.MULTI_XPU)
    environment = mock.patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": "standin:0"})
    known = mock.patch.object(PartialState, "_prepare_backend", return_value=backend)

    def losses(**settings: Any) -> tuple[list[float], Any]:
        arguments = training_arguments(
            str(folder / "out"), folder, use_cpu=False, max_steps=4, **settings
        )
        assert arguments.device == torch.device("standin", 0)
        resumed = HydraTrainer(
            model=small_model().to("standin"), args=arguments, train_dataset=data, eval_dataset=data
        )
        resumed.add_callback(Waits())
        resumed.train(resume_from_checkpoint=settings.get("save_steps") is None)
        logged = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
        return logged, resumed

    profiling = {"repeats": 1, "lengths": [16, 32, 64]}
    with environment, known:
        hydra = {"profile": None, "strategies": None, "profiling": profiling, "context_length": 64}
        measured, _ = losses(save_strategy="no", save_steps=9, hydra=hydra)
    steps.clear()
    with environment, known, observed() as found:
        found["as_proposed"] = measured
        found["losses"], _ = losses(save_strategy="steps", save_steps=2)
        found["waits_of_steps"] = [dict(after - before) for before, after in pairwise(steps)]
        shutil.rmtree(folder / "out" / "checkpoint-4", ignore_errors=True)
        found["resumed"], last = losses(save_strategy="no")
        found["eval_loss"] = last.evaluate()["eval_loss"]
    first = [{k: torch.tensor(v) for k, v in row.items()} for row in rows()[:4]]
    found["wanted"] = token_mean_gradients(small_model(), first)[0]
    return found
