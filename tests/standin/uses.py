"""What users do with an engine beside training it, on stand-in ranks."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engines import small_profile, start_hydra
from models import VOCAB_SIZE, tiny
from single_process import (
    random_examples,
    token_mean_gradients,
)
from test_engine_parity import LENGTHS

from ds_hydra.engine import planning
from ds_hydra.errors import HydraError
from ds_hydra.sampler.plan import IterationPlan
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
    from test_trainer import prepare, rows, training_arguments
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
            folder, output_dir=str(folder / "out"), use_cpu=False, max_steps=4, **settings
        )
        assert arguments.device == torch.device("standin", 0)
        resumed = HydraTrainer(
            model=tiny("llama").to("standin"), args=arguments, train_dataset=data, eval_dataset=data
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
    found["wanted"] = token_mean_gradients(tiny("llama"), first)[0]
    return found


NUM_AHEAD = 5
BROKEN = 3
"""The iteration one of whose rows cannot be read."""


def rows_ahead() -> dict[str, Any]:
    """Losses of the engine's own global batches, those of the same ones given, who fetched the rows
    of each iteration, and in which one an error of a row came.
    """
    import datasets

    rows = [{"input_ids": e["input_ids"].tolist()} for e in random_examples([24] * 80, VOCAB_SIZE)]
    data = datasets.Dataset.from_list(rows)
    profile = _shared_folder() / "profile.json"
    profile.write_text(json.dumps(small_profile(6_000_000, num_layers=4)))
    hydra = {
        "tokens_per_iteration": 200,
        "profile": str(profile),
        "strategies": ["2x<1,1>", "1x<2,1>"],
    }
    engine = start_hydra(tiny("llama").to("standin"), hydra=hydra, training_data=data)
    given = start_hydra(tiny("llama").to("standin"), hydra=hydra)
    fetchers: list[list[str]] = [[] for _ in range(NUM_AHEAD + 2)]
    fetch, drawn = (
        planning.fetch_examples,
        list(islice(engine.hydra.source.iterate_examples(), NUM_AHEAD)),
    )

    def noting(data: Any, plan: IterationPlan, positions: Any) -> Any:
        is_main = threading.current_thread() is threading.main_thread()
        fetchers[plan.iteration].append("main" if is_main else "beside")
        if plan.iteration == BROKEN and len(fetchers[BROKEN]) == 1:
            raise OSError("bad block")
        return fetch(data, plan, positions)

    found: dict[str, Any] = {"losses": [], "wanted": [], "failed": []}
    with mock.patch.object(planning, "fetch_examples", noting), observed() as seen:
        for number in range(NUM_AHEAD):
            if dist.get_rank() == 0:  # until the next plan is there, too
                planner = engine.hydra.source._feed._planner
                planner._pending[number + 1].reply.result(60)
            try:
                found["losses"].append(float(engine.train_batch()))
            except (OSError, HydraError) as error:
                found["failed"] += [number, str(error)]
                break
            found["wanted"].append(float(given.train_batch(drawn[number])))
    return {**found, "fetchers": fetchers, "num_races": len(seen["races"]), "races": seen["races"]}
