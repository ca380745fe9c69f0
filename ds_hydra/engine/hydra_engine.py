"""HydraEngine: DeepSpeedEngine whose propagation changes its parallel strategy every iteration.

DeepSpeed keeps what it is good at (ZeRO-3 partitions, fp32 master weights, Adam, clipping, loss scale,
schedulers, monitors, checkpoints); ds_hydra replaces forward and backward.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger, safe_set_local_grad
from torch import Tensor, nn

from ds_hydra.configs.ds_config import read_ds_config
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.agreement import broadcast_text, raise_together
from ds_hydra.engine.checkpoint import (
    HydraCheckpointEngine,
    Saving,
    find_tag,
    only_weights,
    read_tensors,
    resolve_tag,
    verify,
)
from ds_hydra.engine.host_memory import keep_freed_memory
from ds_hydra.engine.metrics import IterationMetrics, measure_iteration
from ds_hydra.engine.process_end import let_collectives_end_at_exit
from ds_hydra.engine.propagation import Outcome
from ds_hydra.engine.reshard import common_model_file, read_model_states, read_optimizer_states
from ds_hydra.engine.runtime import ExampleLike, HydraRuntime, Iteration
from ds_hydra.engine.skeleton import Skeleton
from ds_hydra.engine.trace import MemoryWatch
from ds_hydra.errors import CheckpointError, HydraConfigError, HydraError, UnsupportedModelError
from ds_hydra.sampler.dataset import TokenDataset
from ds_hydra.simulator.timeline import EventKind
from ds_hydra.strategy import Strategy

CLIENT_STATE_KEY = "ds_hydra"
"""Where a checkpoint's client state keeps what belongs to ds_hydra."""

_LOSS_SCALE_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow")
"""What a ZeRO-3 optimizer keeps when only weights are loaded."""


class HydraEngine(DeepSpeedEngine):
    """A DeepSpeed engine trained by `train_batch()` alone.

    Methods are collective: all ranks call them with the same arguments.
    """

    def __init__(
        self,
        args: Any,
        model: nn.Module,
        *engine_args: Any,
        hydra_config: HydraConfig,
        training_data: Any = None,
        **engine_kwargs: Any,
    ):
        if get_accelerator().device_name() == "cpu":
            keep_freed_memory()
        let_collectives_end_at_exit()
        # The copy must be made before DeepSpeed hooks the model's modules and partitions its parameters.
        skeleton = Skeleton(
            model,
            activation_checkpointing=hydra_config.activation_checkpointing,
            compile_layers=hydra_config.compile_layers,
            tp_sequence_parallel=hydra_config.tp_sequence_parallel,
        )
        self._hydra_config = hydra_config
        self._hydra: HydraRuntime | None = None
        memory = MemoryWatch()  # before DeepSpeed's buffers and states
        self._grads_P: list[Tensor] = []
        super().__init__(args, model, *engine_args, **engine_kwargs)
        self._check_partitions(skeleton)
        self._hydra = HydraRuntime(hydra_config, skeleton, self.device, memory)
        self.last_metrics: IterationMetrics | None = None
        """Metrics of the last iteration; equal on all ranks but for this rank's own iteration and step time."""
        if training_data is not None:  # not DeepSpeed's truth value: an empty dataset is an error to report
            self.training_dataloader = self.deepspeed_io(training_data)
            self._hydra.start_planning()
        if self._hydra.is_first_rank:
            logger.info(self._hydra.describe())

    @property
    def hydra(self) -> HydraRuntime:
        """The collaborator that holds everything of ds_hydra."""
        assert self._hydra is not None
        return self._hydra

    def train_batch(
        self, batch: Sequence[ExampleLike] | None = None, strategy: str | Strategy | None = None
    ) -> Tensor:
        """One iteration: plan, pull, propagate, push, optimizer step. Returns the global token-mean loss.

        Without `batch` the engine's own sampler draws the next mini-batch; otherwise `batch` is the global
        mini-batch, the same list of {"input_ids": [l], "labels": [l]} on every rank. `strategy` (for example
        "2x<1,2>") forces one, else the best candidate is taken. The loss is a 0-dim fp32 tensor, equal on all
        ranks. Raises InfeasiblePlanError on all ranks where no strategy can hold a sequence.
        """
        start = time.perf_counter()
        self._check_trainable()
        with self.hydra.section("plan"):
            iteration = self._plan(batch, strategy)
            with self.hydra.section("propagation"):
                grads_P = self._zero_gradient_shards()
                outcome = self.hydra.train(iteration, grads_P, self._loss_scale())
                outcomes = self.hydra.gather_outcomes(outcome, grads_P)
            loss = sum(o.loss_sum for o in outcomes.ranks) / iteration.plan.num_label_tokens
            before_step = time.perf_counter()
            with self.hydra.section("step"):
                if outcomes.nonfinite_ranks and not self.fp16_enabled():
                    self._skip_step(iteration, outcomes.nonfinite_ranks)
                else:
                    with self.hydra.propagator.recorder.span(EventKind.STEP):
                        self._deposit(grads_P)
                        self._step(iteration)
            if batch is None:
                self.hydra.mark_trained(iteration.plan.iteration)
            self._report(iteration, outcomes.ranks, loss, start, before_step)
        if outcomes.is_stop_requested and self._hydra_config.faults.save_on_sigterm is not None:
            self._save_and_exit(self._hydra_config.faults.save_on_sigterm)
        return torch.tensor(loss, dtype=torch.float32, device=self.device)

    def eval_batch(self, batch: Sequence[ExampleLike], strategy: str | Strategy | None = None) -> Tensor:
        """Global token-mean loss of `batch` without gradients or a step; arguments as in `train_batch`."""
        with self.hydra.section("evaluation"):
            iteration = self._plan(batch, strategy)
            outcome = self.hydra.propagator.evaluate(iteration.plan, iteration.load)
            outcomes = self.hydra.gather_outcomes(outcome).ranks
        loss = sum(o.loss_sum for o in outcomes) / iteration.plan.num_label_tokens
        return torch.tensor(loss, dtype=torch.float32, device=self.device)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Evaluation only: in training mode the layers run inside `train_batch`."""
        if self.module.training and torch.is_grad_enabled():
            self._refuse_by_hand("forward()")
        return super().forward(*inputs, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: backward is part of `train_batch`."""
        self._refuse_by_hand("backward()")

    def step(self, lr_kwargs: Any = None) -> NoReturn:
        """Refused: the optimizer step is part of `train_batch`."""
        self._refuse_by_hand("step()")

    def deepspeed_io(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Take `dataset` as the source of `train_batch()`; returns an endless iterable of mini-batches.

        Called with `training_data` at the end of initialisation. The iterable yields global mini-batches
        (lists of examples) for `train_batch(batch=...)`, and is not needed for `train_batch()`.
        """
        self.hydra.attach_data(self._read_data(dataset))
        return _MiniBatches(self)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """DeepSpeed's checkpoint, written aside and put in its place whole (see engine/checkpoint.py).

        Its client state also holds the position in the data, the cost model and the configuration. Raises
        CheckpointError on all ranks where one of them could not write; then the checkpoint before it stays.
        """
        with self.hydra.section("saving"):
            self._save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        return True

    def _save(
        self,
        save_dir: str,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
        exclude_frozen_parameters: bool,
    ) -> None:
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        saving = Saving(save_dir, tag)
        state = {**(client_state or {}), CLIENT_STATE_KEY: self.hydra.state_dict()}
        commits = (self.local_rank if self.use_node_local_storage() else self.global_rank) == 0
        self._together(saving.begin if commits else None)
        super().save_checkpoint(str(saving.folder), tag, state, False, exclude_frozen_parameters)
        self.checkpoint_engine.write_digests(saving.folder, self.global_rank)
        error = self.checkpoint_engine.take_error()
        try:
            raise_together(error, self.device)
            world_size = deepspeed.comm.get_world_size()
            self._together(
                functools.partial(saving.commit, world_size=world_size, save_latest=save_latest)
                if commits
                else None
            )
        except CheckpointError:
            if commits:
                saving.abort()
            raise

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> Any:
        """DeepSpeed's `load_checkpoint`; training continues with the mini-batch after the checkpoint.

        The checkpoint may have been saved by another number of ranks, or by stock DeepSpeed. Files that are
        not as they were written are refused by name (CheckpointError, on all ranks), and nothing but tensors
        and plain values is unpickled. With `load_module_only` only weights are loaded: the position in the
        data, the step count and the optimizer stay as they are.
        """
        options = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        with self.hydra.section("loading"):
            return self._load(load_dir, tag, *options, custom_load_fn)

    def _load(
        self,
        load_dir: str,
        tag: str | None,
        load_module_strict: bool,
        load_optimizer_states: bool,
        load_lr_scheduler_states: bool,
        load_module_only: bool,
        custom_load_fn: Callable[..., Any] | None,
    ) -> Any:
        universal = self.load_universal_checkpoint()
        tag = self._agree_on_tag(load_dir, tag, "latest_universal" if universal else "latest")
        if tag is None:
            return super().load_checkpoint(load_dir, None)  # which says what is missing
        folder = Path(load_dir, tag)
        rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
        readers: Sequence[int] = range(world_size)
        if self.use_node_local_storage():
            readers = self.hydra.propagator.hosts.ranks_beside(rank)
        self._together(
            functools.partial(verify, folder, reader=readers.index(rank), num_readers=len(readers))
        )
        if not universal:
            self._together(functools.partial(self._read_checkpoint, folder, load_optimizer_states))
        with_optimizer = load_optimizer_states if universal else True  # else what was read stands in for it
        options = (load_module_strict, with_optimizer, load_lr_scheduler_states, load_module_only)
        try:
            with only_weights():
                path, client_state = super().load_checkpoint(load_dir, tag, *options, custom_load_fn)
            if load_module_only and not universal:
                states = self.checkpoint_engine.handed["_optim_states.pt"]["optimizer_state_dict"]
                scaler = {key: getattr(self.optimizer, key) for key in _LOSS_SCALE_KEYS}
                self.optimizer.load_state_dict([states | scaler] * world_size, load_optimizer_states=False)
        finally:
            self.checkpoint_engine.handed = {}
        state = (client_state or {}).pop(CLIENT_STATE_KEY, {})
        if not load_module_only:  # new data may start from another run's weights
            self.hydra.load_state_dict(state)
        return path, client_state

    def _read_checkpoint(self, folder: Path, load_optimizer_states: bool) -> None:
        """Read what this rank needs, whatever number of ranks has saved it, before anything is changed."""
        rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
        model = read_model_states(folder, rank, world_size)
        old_world = read_tensors(common_model_file(folder, rank), mmap=True)["dp_world_size"]
        if self.use_node_local_storage() and old_world != world_size:
            raise CheckpointError(
                f"{folder} was saved by {old_world} ranks on storage of each node, and there are {world_size}; "
                f"resume on {old_world} ranks, or copy the files of all nodes to a folder that all share and remove "
                "checkpoint.use_node_local_storage"
            )
        handed = {"_model_states.pt": model}
        if self.zero_nvme_offload_optimizer():
            if old_world != world_size:
                raise CheckpointError(
                    f"{folder} was saved by {old_world} ranks with the optimizer on NVMe, and there are "
                    f"{world_size}; resume on {old_world} ranks, or convert it to a universal checkpoint"
                )
        else:
            groups = self._get_zero_param_shapes()
            optim = read_optimizer_states(folder, model["param_shapes"], old_world, groups, rank, world_size)
            if not load_optimizer_states:
                optim["optimizer_state_dict"]["optimizer_state_dict"] = self.optimizer.state_dict()[
                    "optimizer_state_dict"
                ]
            handed["_optim_states.pt"] = optim
        self.checkpoint_engine.handed = handed

    def _agree_on_tag(self, load_dir: str, tag: str | None, latest: str) -> str | None:
        """The folder of the given checkpoint, or of the one that rank 0 sees as the last; None without one."""
        found: list[str] = []

        def look() -> None:
            wanted = find_tag(Path(load_dir), latest) if tag is None else str(tag)
            found.append(resolve_tag(Path(load_dir), wanted) if wanted else "")

        self._together(look if self.global_rank == 0 else None)
        return broadcast_text(found or [""], 0, self.device)[0] or None

    def _together(self, action: Callable[[], Any] | None) -> None:
        """Run what this rank has to do with files, if anything; an error is raised on all ranks."""
        error: Exception | None = None
        try:
            if action is not None:
                action()
        except HydraError as caught:
            error = caught
        except OSError as caught:
            error = CheckpointError(f"{caught}; the checkpoint before it, if any, is as it was")
        raise_together(error, self.device)

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        self.checkpoint_engine = HydraCheckpointEngine()

    def _copy_recovery_script(self, save_path: str) -> None:
        self.checkpoint_engine.copy_recovery_script(
            functools.partial(super()._copy_recovery_script, save_path)
        )

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]:
        # DeepSpeed looks for the file of this very rank, which a smaller world has not written.
        if self.load_universal_checkpoint():
            return super()._get_all_ckpt_names(checkpoints_path, tag)
        return [str(common_model_file(Path(checkpoints_path, tag), self.global_rank))]

    def destroy(self) -> None:
        """Stop planning processes and files, then DeepSpeed's own clean-up."""
        if getattr(self, "_hydra", None) is not None:
            self.hydra.close()
        super().destroy()

    def _plan(self, batch: Sequence[ExampleLike] | None, strategy: str | Strategy | None) -> Iteration:
        if isinstance(strategy, str):
            strategy = Strategy.parse(strategy)
        if batch is None:
            if strategy is not None:
                raise HydraConfigError(
                    "a forced strategy needs a given mini-batch: call train_batch(batch=examples, strategy=...), "
                    "or list the strategies to choose from in hydra.strategies"
                )
            return self.hydra.next_iteration()
        return self.hydra.plan_examples(batch, strategy, self.global_steps)

    def _check_trainable(self) -> None:
        """What is trained was fixed at initialisation: in the link plans and in ZeRO-3's own groups."""
        for param, spec in zip(self.hydra.skeleton.params, self.hydra.skeleton.specs, strict=True):
            if param.requires_grad != spec.requires_grad:
                raise HydraConfigError(
                    f"{spec.fqn}.requires_grad is {param.requires_grad} and was {spec.requires_grad} at "
                    "initialisation; set it before ds_hydra.initialize"
                )

    def _loss_scale(self) -> float:
        return float(self.optimizer.loss_scale) if self.fp16_enabled() else 1.0

    def _zero_gradient_shards(self) -> list[Tensor]:
        """This rank's fp32 gradient shards, set to zero; the same memory in every iteration."""
        if not self._grads_P:
            self._grads_P = [
                torch.zeros(
                    p.ds_tensor.numel() if p.requires_grad else 0, dtype=torch.float32, device=self.device
                )
                for p in self.hydra.skeleton.params
            ]
        else:
            torch._foreach_zero_(self._grads_P)
        return self._grads_P

    def _deposit(self, grads_P: Sequence[Tensor]) -> None:
        """Hand the gradient shards to ZeRO-3 as if its own backward had reduced them."""
        for param, grad_P in zip(self.hydra.skeleton.params, grads_P, strict=True):
            if param.requires_grad:
                safe_set_local_grad(param, grad_P)
        self.optimizer.independent_gradient_partition_epilogue()

    def _step(self, iteration: Iteration) -> None:
        # DeepSpeed counts train_batch_size() samples per step; monitors shall see what was trained.
        self.global_samples += len(iteration.plan.lengths) - self.train_batch_size()
        self.set_gradient_accumulation_boundary(True)
        super().step()
        # Without this a later plain step() would take every micro-step for a boundary.
        self._is_gradient_accumulation_boundary = None

    def _skip_step(self, iteration: Iteration, ranks: Sequence[int]) -> None:
        """Count an iteration without changing a weight, as DeepSpeed does after an overflow in fp16.

        In bf16 and fp32 DeepSpeed would step, and every weight would be NaN from then on.
        """
        if self.global_rank == 0:
            logger.warning(
                f"iteration {iteration.plan.iteration}: NaN or Inf among the gradients of ranks {list(ranks)}; "
                f"no weight was changed ({self.skipped_steps + 1} steps skipped so far)"
            )
        self.global_samples += len(iteration.plan.lengths)
        self.global_steps += 1
        self.micro_steps += 1
        self.skipped_steps += 1
        self._step_applied = False
        self._global_grad_norm = math.inf

    def _save_and_exit(self, save_dir: str) -> NoReturn:
        """What SIGTERM asks for, on all ranks after the same iteration."""
        self.save_checkpoint(save_dir)
        if self.global_rank == 0:
            logger.info(f"SIGTERM: saved step {self.global_steps} in {save_dir}, ending")
        self.destroy()
        raise SystemExit(0)

    def _report(
        self, iteration: Iteration, outcomes: Sequence[Outcome], loss: float, start: float, before_step: float
    ) -> None:
        now = time.perf_counter()
        grad_norm = self.get_global_grad_norm()
        metrics = measure_iteration(
            iteration.plan,
            outcomes,
            loss=loss,
            iteration_ms=(now - start) * 1e3,
            step_ms=(now - before_step) * 1e3,
            planning_ms=iteration.planned.planning_ms,
            waited_ms=iteration.planned.waited_ms,
            lr=float(self.get_lr()[0]),
            grad_norm=math.nan if grad_norm is None else float(grad_norm),
            strategy_index=self.hydra.find_candidate(iteration.plan.strategy),
            pack_occupancy=self.hydra.pack_occupancy(iteration.plan),
            skipped_steps=self.skipped_steps,
            find_straggler=self.hydra.straggler.observe,
        )
        self.hydra.learn(iteration.plan, [p.measured_ms for p in metrics.pipelines])
        self.last_metrics = metrics
        self.hydra.write_log(metrics, iteration.plan)
        if self.monitor.enabled and self.global_rank == 0:
            self.monitor.write_events(metrics.monitor_events(self.global_samples))

    def _read_data(self, dataset: Any) -> TokenDataset:
        """Token lengths of `dataset`; rank 0 of each node tokenises, the others find its cache."""
        config = self._hydra_config
        tokenize = None
        if config.tokenizer is not None:
            from transformers import AutoTokenizer

            try:
                tokenize = AutoTokenizer.from_pretrained(config.tokenizer)
            except (OSError, ValueError) as error:
                raise HydraConfigError(
                    f"hydra.tokenizer is {config.tokenizer!r}, which cannot be loaded; give a folder with "
                    f"tokenizer.json or a hub id ({error})"
                ) from error
        read = functools.partial(
            TokenDataset.from_dataset,
            dataset,
            context_length=config.context_length,
            over_length=config.over_length,
            text_column=config.text_column,
            tokenize=tokenize,
        )
        with _first_on_node():
            data = read()
        if self.global_rank == 0:
            logger.info(f"ds_hydra training data: {data.report}")
        return data

    def _check_partitions(self, skeleton: Skeleton) -> None:
        """The plain ZeRO-3 layout over all ranks is the one that links are planned for."""
        world = deepspeed.comm.get_world_size()
        for param, spec in zip(skeleton.params, skeleton.specs, strict=True):
            if not hasattr(param, "ds_tensor"):
                raise HydraConfigError(
                    f"parameter {spec.fqn} is not partitioned: zero_optimization.stage must be 3 and the model "
                    "must not share parameters with another engine"
                )
            if param.ds_tensor.numel() != spec.shard_numel(world):
                raise UnsupportedModelError(
                    f"parameter {spec.fqn} of {spec.numel} elements has a ZeRO-3 partition of "
                    f"{param.ds_tensor.numel()} elements, expected {spec.shard_numel(world)} (numel / {world} "
                    "ranks, rounded up); remove zero_optimization keys that change the partitioning"
                )

    def _refuse_by_hand(self, what: str) -> NoReturn:
        raise HydraConfigError(
            f"{what} was called by hand, but each rank holds other layers in every iteration; call "
            "engine.train_batch(batch=examples) (or engine.train_batch() with training_data), and "
            "engine.eval_batch(examples) or engine.eval() for evaluation"
        )


class _MiniBatches:
    """Endless global mini-batches of an engine's data, as lists of examples."""

    def __init__(self, engine: HydraEngine):
        self._engine = engine

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return self._engine.hydra.iterate_examples()


@contextlib.contextmanager
def _first_on_node() -> Iterator[None]:
    """Rank 0 of each node runs the block first, the other ranks after it. Collective."""
    is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    try:
        if not is_first:
            deepspeed.comm.barrier()
        yield
    finally:
        if is_first:
            deepspeed.comm.barrier()


@contextlib.contextmanager
def hydra_engine_class(hydra_config: HydraConfig) -> Iterator[None]:
    """While open, `deepspeed.initialize` builds a HydraEngine, wherever it is called from."""
    original = deepspeed.DeepSpeedEngine
    # A class, not a partial: accelerate asks isinstance(model, deepspeed.DeepSpeedEngine) meanwhile.
    init = functools.partialmethod(HydraEngine.__init__, hydra_config=hydra_config)
    deepspeed.DeepSpeedEngine = type(HydraEngine.__name__, (HydraEngine,), {"__init__": init})
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine = original


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | dict[str, Any] | None = None,
) -> tuple[HydraEngine, Any, Any, Any]:
    """A HydraEngine, its optimizer, an iterator of mini-batches, its scheduler: `deepspeed.initialize` otherwise.

    `config` (or `args.deepspeed_config`) is the DeepSpeed JSON with a "hydra" section. `training_data` is a
    `datasets.Dataset` with `input_ids`, or with a text column and `hydra.tokenizer`. Collective over all ranks.
    Raises HydraConfigError, on all ranks, for what must be edited.
    """
    from_args = getattr(args, "deepspeed_config", None)
    given = config if config is not None else config_params if config_params is not None else from_args
    if given is None:
        raise HydraConfigError("no configuration: pass config= or start with --deepspeed_config FILE")
    if from_args is not None:
        args = copy.copy(args)  # the caller's stays as it is
        args.deepspeed_config = None  # DeepSpeed would read the file again, "hydra" section and all
    if model is None:
        raise HydraConfigError("no model: pass model=, e.g. a LlamaForCausalLM")
    ds_config, hydra_config = read_ds_config(given)
    if model_parameters is None and optimizer is None:
        model_parameters = [p for p in model.parameters() if p.requires_grad]
    with hydra_engine_class(hydra_config):
        return deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=ds_config,
            mesh_param=mesh_param,
        )
