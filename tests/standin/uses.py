"""What users do with an engine beside training it, on stand-in ranks."""

from __future__ import annotations

import queue
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engines import start_hydra
from models import VOCAB_SIZE, tiny
from peer_homes import homes_in_parts
from single_process import (
    num_label_tokens,
    random_examples,
    summed_loss,
    token_mean_gradients,
)
from test_engine_parity import LENGTHS

from standin import device
from standin.checks import SHORT, observed, start


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


def adapters() -> dict[str, Any]:
    """Losses of a model with LoRA adapters, which alone are trained."""
    from test_lora import adapted  # which needs peft

    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    model = adapted()
    with torch.no_grad():
        loss = sum(float(summed_loss(model, example)) for example in examples)
    wanted = loss / num_label_tokens(examples)
    engine = start_hydra(model.to("standin"))
    with observed() as found:
        found["losses"] = [float(engine.train_batch(examples, strategy=s)) for s in SHORT]
    return {**found, "wanted": wanted}


class _Generator(torch.Generator):
    """The CPU's: the device has none of its own."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


def doctor() -> dict[str, Any]:
    """The document of an examination."""
    from ds_hydra.engine.doctor.examination import Examination, Request

    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    examination = Examination(Request(seconds=10), ended.put)
    homes = homes_in_parts("standin", device.extension().as_device)
    with mock.patch.object(torch, "Generator", _Generator), homes:
        threading.Thread(target=lambda: ended.put(examination.run()), daemon=True).start()
        report = ended.get()
    assert report is not None
    return report.to_json()
