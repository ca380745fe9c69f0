"""HydraEngine: DeepSpeedEngine whose propagation changes its parallel strategy every iteration.

DeepSpeed keeps what it is good at (ZeRO-3 partitions, fp32 master weights, Adam, clipping, loss
scale, schedulers, monitors, checkpoints); ds_hydra replaces forward and backward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.constants import ROUTE_TRAIN
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils.logging import log_levels
from torch import Tensor, nn

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.checkpointing.engine import CheckpointingEngine
from ds_hydra.engine.checkpointing.files import try_folder
from ds_hydra.engine.examples import (
    GlobalBatches,
    local_rank,
    only_ids,
    read_data,
    refuse_by_hand,
    warn_of_collator,
)
from ds_hydra.engine.gradient_shards import GradientShards
from ds_hydra.engine.iteration import (
    Iteration,
    Outcomes,
    gather_outcomes,
    gather_scores,
    linearised,
    score,
    with_score_recorder,
)
from ds_hydra.engine.losses.loss import CrossEntropy, Loss
from ds_hydra.engine.losses.objective import Scores
from ds_hydra.engine.model import adapters, held_models
from ds_hydra.engine.model.liger import choose_layers
from ds_hydra.engine.model.model_checks import is_quantised
from ds_hydra.engine.model.packing_probe import build_stage_model
from ds_hydra.engine.model.scheme_support import check_context, find_unseen_positions
from ds_hydra.engine.model.stage_model import StageModel, options_of
from ds_hydra.engine.planning import ExampleLike, IterationSource
from ds_hydra.engine.propagation import Propagator
from ds_hydra.engine.ranks.agreement import (
    check_alike,
    gather_flags,
    open_host_group,
    run_together,
)
from ds_hydra.engine.ranks.memory import (
    freeze_gc,
    to_device,
    unfreeze_gc,
)
from ds_hydra.engine.ranks.process import (
    find_restart_problem,
    leave_out_shared_memory,
    let_collectives_end_at_exit,
    let_one_rank_speak,
    offloads_optimizer,
    overlap_where_safe,
    remove_stale_locks,
    use_deterministic_kernels,
)
from ds_hydra.engine.ranks.settings import check_same_settings, comparable
from ds_hydra.engine.ranks.sigterm import SIGTERM
from ds_hydra.engine.ranks.watchdog import join_watchdog, leave_watchdog, watch
from ds_hydra.engine.reporting import IterationReporter, Stamps
from ds_hydra.engine.telemetry.trace import MemoryWatch
from ds_hydra.environment import is_first_on_host
from ds_hydra.errors import HydraConfigError, HydraError, UnsupportedModelError
from ds_hydra.progress import say_once, show_notes
from ds_hydra.records.metrics import IterationMetrics
from ds_hydra.records.timeline import EventKind
from ds_hydra.sampler.background import PlannedIteration
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy import Strategy
from ds_hydra.strategy.schemes.placement import group_limit

leave_out_shared_memory()
let_one_rank_speak()
# DeepSpeed calls them, and who reads a log cannot change it.
warnings.filterwarnings(
    "ignore",
    message=r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated",
    category=FutureWarning,
)


logger = logging.getLogger(__name__)

_SETTLED_AFTER, _FREEZES_EVERY = 5, 100
"""Iterations after which the garbage collector is frozen, when start-up objects (kernels, plans,
profiles) exist; and after which it is frozen again, as another engine may have unfrozen it.
"""

Method = TypeVar("Method", bound=Callable[..., Any])


def _in_own_modes(method: Method) -> Method:
    """`method` as if its caller had opened neither `torch.autocast` nor `torch.inference_mode`, and
    set no default dtype or device: the configuration says what an iteration computes.
    """

    @functools.wraps(method)
    def in_own_modes(self: HydraEngine, *args: Any, **kwargs: Any) -> Any:
        kind = self.device.type
        if torch.is_autocast_enabled(kind):
            say_once(
                f"{method.__name__}() was called under torch.autocast, which has no effect there: layers run in the "
                'model\'s dtype; for 16 bit set "bf16": {"enabled": true}'
            )
        with torch.autocast(kind, enabled=False), torch.inference_mode(False), _torch_defaults():
            return method(self, *args, **kwargs)

    return in_own_modes  # type: ignore[return-value]


@contextlib.contextmanager
def _torch_defaults() -> Iterator[None]:
    """torch's own default dtype and device, in which numbers of examples are read."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        with contextlib.nullcontext() if device.type == "cpu" else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


class _Destroyed:
    """Stand-in for what an engine no longer has."""

    def __getattr__(self, name: str) -> NoReturn:
        raise HydraError("this engine was destroyed; make a new one with ds_hydra.initialize")


_DESTROYED: Any = _Destroyed()


class HydraEngine(CheckpointingEngine):
    """A DeepSpeed engine trained by `train_batch()` alone: `source` says what comes next,
    `propagator` runs it, `reporter` says what it did.

    Methods are collective: all ranks call them with the same arguments.
    """

    source = propagator = reporter = _DESTROYED

    def __init__(
        self,
        args: Any,
        model: nn.Module,
        *engine_args: Any,
        hydra_config: HydraConfig,
        training_data: Any = None,
        **engine_kwargs: Any,
    ):
        document = getattr(engine_kwargs.get("config_class"), "_param_dict", None) or {}
        show_notes(log_levels.get(str(document.get("log_level")).lower()))
        held_models.check_free(model)
        let_collectives_end_at_exit()
        # An engine that was destroyed may be frozen garbage: its memory is wanted now
        unfreeze_gc()
        self._hydra_config = hydra_config
        self._num_trained = 0
        self._gradients: GradientShards | None = None
        self.on_sigterm: Callable[[], None] | None = None
        """Callback in place of saving and ending: a Trainer has more to save."""
        self.last_scores: Scores | None = None
        self._last_metrics: IterationMetrics | None = None
        self._ended_metrics: IterationMetrics | None = None
        self.last_plan: IterationPlan | None = None
        """Plan of the last iteration."""
        place = local_rank()
        # Before anything of the device is used, or all ranks of a host would meet on device 0
        get_accelerator().set_device(place)
        self.device = torch.device(get_accelerator().device_name(place))
        if deepspeed.comm.get_rank() == 0 and (problem := find_restart_problem(os.environ)):
            logger.warning(problem)
        self._is_watched = True
        try:
            with _torch_defaults():
                join_watchdog(hydra_config.faults, self.device)
            with watch("start"), _torch_defaults():
                self._start(args, model, engine_args, engine_kwargs)
                # Not DeepSpeed's truth value: an empty dataset is an error to report
                if training_data is not None:
                    collate_fn = engine_kwargs.get("collate_fn")
                    self.training_dataloader = self.deepspeed_io(
                        training_data, collate_fn=collate_fn
                    )
                    self.source.start()
                self._watch_sigterm()
        except BaseException:
            # A notebook may mend what was wrong, and start on the same model.
            with contextlib.suppress(Exception):
                self._end(waits=False)
            raise
        if self.global_rank == 0:
            logger.info(self.reporter.describe())

    def _start(
        self, args: Any, model: nn.Module, engine_args: Any, engine_kwargs: Mapping[str, Any]
    ) -> None:
        # First, so that the agreements below go by way of the hosts
        open_host_group(self.device)
        # Before DeepSpeed compiles anything: it would wait for a lock that nobody holds
        run_together(lambda: remove_stale_locks(is_first_on_host()), self.device)
        # Before DeepSpeed hooks the model's modules: what a stage changes of them is found here.
        config = self._hydra_config = choose_layers(self._hydra_config, model)
        document = getattr(engine_kwargs.get("config_class"), "_param_dict", None) or {}
        run_together(lambda: _check_dtypes(model, engine_kwargs.get("config_class")), self.device)
        make_stage_model = functools.partial(
            build_stage_model,
            model,
            offloads_optimizer=offloads_optimizer(document),
            **options_of(config),
        )
        stage_model = run_together(make_stage_model, self.device)
        check_context(stage_model.abilities, stage_model.config, config.context_length)
        note = find_unseen_positions(stage_model.config, config.context_length)
        if note and deepspeed.comm.get_rank() == 0:
            logger.warning(note)
        memory = MemoryWatch()  # before DeepSpeed's buffers and states
        held_models.hold(model)
        self._held = [model]  # a list, because this is no nn.Module yet
        super().__init__(args, model, *engine_args, **engine_kwargs)
        # DeepSpeed has partitioned by now, and no link has been planned yet
        run_together(functools.partial(self._check_partitions, stage_model), self.device)
        run_together(functools.partial(self._complete_optimizer, stage_model), self.device)
        check_same_settings(self)
        # Differing keys would end in different collectives, which hang in place of telling
        check_alike(comparable(config), self.device)
        config = self._hydra_config = overlap_where_safe(config, self.device)
        # Before kernels are chosen: some of them have no order of sums
        if config.deterministic:
            use_deterministic_kernels(self.device)
        run_together(lambda: stage_model.to_device(self.device), self.device)
        self.propagator = Propagator(
            stage_model,
            device=self.device,
            max_groups=group_limit(self.world_size, config.max_process_groups),
            link_config=config.link,
            seed=config.seed,
            memory_limit_bytes=config.memory_limit_bytes,
        )
        self.source = IterationSource(config, self.propagator)
        self.reporter = IterationReporter(self.source.candidates, memory)

    @property
    def last_metrics(self) -> IterationMetrics | None:
        """Metrics of the last iteration; equal on all ranks but for this rank's own iteration and
        step time. Where an accelerator may still run the step, the host waits for its end when one
        of these is read: `iteration_ms`, `step_ms`, `tokens_per_s`, `tflops_per_device`, `mfu`,
        `grad_norm`.
        """
        return self._last_metrics

    @property
    def ended_metrics(self) -> IterationMetrics | None:
        """Metrics of the last iteration that nothing has to wait for: on an accelerator the one
        before the last.
        """
        return self._ended_metrics

    @_in_own_modes
    def train_batch(
        self,
        batch: Sequence[ExampleLike] | None = None,
        strategy: str | Strategy | None = None,
        loss: Loss | None = None,
        *,
        keep_scores: bool = False,
    ) -> Tensor:
        """One iteration: plan, pull, propagate, push, optimizer step. Returns the global token-mean
        loss.

        Without `batch` the engine's own sampler draws the next global batch; otherwise `batch` is
        the global batch, the same list of {"input_ids": [l], "labels": [l]} on every rank.
        `strategy` (for example "2x<1,2>") forces one, else the best candidate is taken. `loss`
        takes the place of the mean cross entropy (`ds_hydra.losses`); its fields are columns of a
        given global batch's examples, without which it is a `CrossEntropy` that reads none.
        `keep_scores` with a `loss` of a given global batch leaves in `last_scores` what the pass
        says of the tokens that count; None where the loss is the mean cross entropy, which keeps
        none. The loss is a 0-dim fp32 tensor, equal on all ranks.
        Raises, on all ranks, InfeasiblePlanError where no strategy can fit a sequence, and
        HydraDataError where `loss` is not finite.
        """
        reads_none = loss is None or (isinstance(loss, CrossEntropy) and loss.weights is None)
        if batch is None and (strategy is not None or not reads_none):
            raise HydraConfigError(
                "a forced strategy, and a loss other than a cross entropy without weights, need a given global batch: "
                "call train_batch(batch=examples, ...); strategies to choose from are listed in hydra.strategies"
            )
        clock, source = self.propagator.clock, self.source
        begin = clock.stamp()
        with watch("plan"):
            problem = (
                self._find_untrained() or self._find_offloaded("train") or self._find_refrozen()
            )
            if batch is None:
                iteration = source.next(problem, loss)
            else:
                given = (batch, strategy, self.global_steps, problem, loss)
                iteration = source.plan(*given, call="train_batch(batch)")
            # A section inside of the one of the plan: the whole iteration is one for the watchdog
            with watch("propagation"):
                outcomes = self._propagate(iteration, keep_scores)  # below nothing is decided
            value = outcomes.loss()
            step = clock.stamp()
            with watch("step"):
                self._step_or_skip(outcomes)
            source.mark_trained(iteration.plan, batch)  # a checkpoint continues after it
            stamps = Stamps(begin=begin, step=step, end=clock.stamp())
            self._report(iteration.planned, outcomes, stamps, value)
            self._look_after_memory()
        self._stop_if(outcomes.is_stop_requested)
        return to_device(torch.tensor(value, dtype=torch.float32), self.device)

    def _propagate(self, iteration: Iteration, keep_scores: bool) -> Outcomes:
        """Pull, run and push: add the gradients of `iteration` to the shards, and gather what all
        ranks report.
        """
        propagator = self.propagator
        iteration = linearised(iteration, propagator)
        # The pass that trains keeps the scores: they cost none of their own.
        objective, recorder = with_score_recorder(iteration, self.device, wanted=keep_scores)
        grads_P = self._zero_gradient_shards()
        scale = float(self.optimizer.loss_scale) if self.fp16_enabled() else 1.0
        outcome = propagator.train(iteration.plan, iteration.load, grads_P, scale, objective)
        outcomes = gather_outcomes(
            propagator,
            # Errors name the caller's loss, not the recorder around it.
            replace(outcome, objective=iteration.objective),
            # Norms travel in the row of the losses, so that ZeRO-3 need not ask the device again
            self._gradients.squares(),
            self.optimizer.param_groups,
            # In the row that is exchanged anyway: all hear of the signal in the same iteration
            is_stop_requested=SIGTERM.is_asked(self),
        )
        self._gradients.tell(outcomes.squares)
        if recorder is not None:
            self.last_scores = gather_scores(iteration, recorder, propagator)
        return outcomes

    def _look_after_memory(self) -> None:
        """Count an iteration; look after a checkpoint beside it, and the collector of garbage."""
        self._num_trained += 1
        # Here all ranks stand at the same place: what failed beside training is raised on all
        self._settle_saving(waits=False)
        if self._num_trained % _FREEZES_EVERY == _SETTLED_AFTER:
            freeze_gc()

    @_in_own_modes
    def eval_batch(
        self,
        batch: Sequence[ExampleLike],
        strategy: str | Strategy | None = None,
        loss: Loss | None = None,
    ) -> Tensor:
        """Loss of `batch`, without `loss` the global token-mean, without gradients or a step;
        arguments as in `train_batch`.
        """
        with watch("evaluation"):
            iteration = self.source.plan(
                batch,
                strategy,
                self.global_steps,
                self._find_offloaded("eval"),
                loss,
                call="eval_batch()",
                forward_only=True,
            )
            iteration = linearised(iteration, self.propagator)
            given = iteration.plan, iteration.load, iteration.objective
            outcome = self.propagator.evaluate(*given)
            is_asked = SIGTERM.is_asked(self)
            outcomes = gather_outcomes(self.propagator, outcome, is_stop_requested=is_asked)
            value = outcomes.loss()
        self._stop_if(outcomes.is_stop_requested)
        return to_device(torch.tensor(value, dtype=torch.float32), self.device)

    @_in_own_modes
    def score(
        self,
        batch: Sequence[ExampleLike],
        strategy: str | Strategy | None = None,
        *,
        entropy: bool = False,
        details: bool = False,
        noise: bool = False,
    ) -> Scores:
        """Log-probabilities of all tokens of `batch`, on request entropies, and with `details` what
        else `Scores` has; forward only. With `noise` under the dropout and NEFTune that the next
        iteration has if it trains the same sequences in this order.

        `batch` and `strategy` as in `train_batch`; labels do not matter. Returned on every rank, in
        the order of `batch`: value i of a sequence is about token i given those before it, 0 for
        the first.
        """
        with watch("scores"):
            rows = [only_ids(row) for row in batch]
            iteration = self.source.plan(
                rows,
                strategy,
                self.global_steps,
                self._find_offloaded("eval"),
                call="score()",
                forward_only=True,
                only_scored=True,
            )
            wanted = {"entropy": entropy, "details": details, "noise": noise}
            return score(iteration, self.propagator, **wanted)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Evaluation only: in training mode the layers run inside `train_batch`."""
        if self.module.training and torch.is_grad_enabled():
            refuse_by_hand("forward() was called by hand")
        with watch("evaluation"):
            return super().forward(*inputs, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: backward is part of `train_batch`."""
        refuse_by_hand("backward() was called by hand")

    def step(self, lr_kwargs: Any = None) -> NoReturn:
        """Refused: the optimizer step is part of `train_batch`."""
        refuse_by_hand("step() was called by hand")

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = ROUTE_TRAIN,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Take `dataset` as the source of `train_batch()`; returns an endless iterable of
        global batches. `data_sampler` is refused, the other arguments of DeepSpeed
        have no meaning.

        The iterable yields global batches (lists of examples) for `train_batch(batch=...)`,
        and is not needed for `train_batch()`. A new loop over it, or one after a resume, goes on
        after the last of these lists that was trained as it is; a copy of one is not known.
        """
        warn_of_collator(collate_fn)
        if data_sampler is not None:
            raise HydraConfigError(
                f"data_sampler is a {type(data_sampler).__name__}, but the engine draws the global batches itself; "
                "select the rows in the dataset, and set hydra.shuffle to false to keep their order"
            )
        with watch("reading data"):
            data = read_data(dataset, self._hydra_config, self.device)
            run_together(lambda: self.source.attach(data), self.device)
        return GlobalBatches(lambda: self.source.iterate_examples())

    def compile(self, *_args: Any, **_kwargs: Any) -> None:
        """Refused: it would compile a forward of DeepSpeed that does not run."""
        raise HydraConfigError(
            "engine.compile() compiles a forward that ds_hydra does not run; set hydra.compile_layers to true, and "
            "leave out dynamo_backend of accelerate (ACCELERATE_DYNAMO_BACKEND), which calls it"
        )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Refused: global batches are counted in tokens."""
        raise HydraConfigError(
            f"set_train_batch_size({train_batch_size}) has nothing to set: global batches have "
            "hydra.tokens_per_iteration tokens"
        )

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Refused, as `set_train_batch_size`."""
        raise HydraConfigError(
            f"set_train_micro_batch_size({micro_batch_size}) has nothing to set: micro-batches are packed by the plan, "
            "up to what memory holds"
        )

    def offload_states(self, include: Any = None, *args: Any, **kwargs: Any) -> None:
        """Offload states as DeepSpeed does. `eval_batch` and `score` still run, unless "lp_params"
        are offloaded.
        """
        has_gradients = include is None or OffloadStateTypeEnum.lp_grads in include
        super().offload_states(include, *args, **kwargs)
        # The shards lie in ZeRO-3's own memory, which they would keep on the device
        if has_gradients and self._gradients is not None:
            self._gradients.release()

    def destroy(self) -> None:
        """Stop planning processes, files, process groups; DeepSpeed's own clean-up; with the last
        engine of a process wait for the other ranks to come here, and end the watchdog. The model
        stays partitioned, and another engine may start on it.

        Raises RankLostError where one of them is lost, CheckpointError where a checkpoint that was
        written beside training is not complete. In an `except` or `finally` that an error has led
        to, no rank is waited for.
        """
        # The others may never come here: they may still be in the iteration that failed
        waits = sys.exc_info()[0] is None
        try:
            if waits and not self.is_destroyed:
                self.wait_for_checkpoint()
        finally:
            self._end(waits=waits)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # it may be half made
            self._end(waits=False)  # garbage is collected when each rank likes

    @property
    def is_destroyed(self) -> bool:
        """Whether nothing can be asked of it any more."""
        return self.reporter is _DESTROYED

    def _end(self, *, waits: bool) -> None:
        try:
            if not self.is_destroyed:
                # First: it may still read times of the propagator's clock
                self.reporter.close(waits=waits)
                self.source.close()
                self.propagator.close()
                # The model has hooks of DeepSpeed that hold the engine
                self.reporter = self.source = self.propagator = _DESTROYED
                self._gradients = None
                unfreeze_gc()
            super().destroy()
        finally:
            held = getattr(self, "_held", [])
            while held:  # once: another engine may have the model then
                held_models.let_go(held.pop())
            try:
                if getattr(self, "_is_watched", False):
                    # Once: engines of a process are counted, and `__del__` comes here again
                    self._is_watched = False
                    leave_watchdog(waits=waits)
            finally:
                SIGTERM.leave(self)

    def _find_untrained(self) -> HydraConfigError | None:
        """The error that names what an evaluation engine lacks for training; None otherwise."""
        # Without an optimizer DeepSpeed has an object in its place that only partitions
        if hasattr(self.optimizer, "fp16_groups"):
            return None
        instead = 'no optimizer; give ds_hydra.initialize one, or the DeepSpeed config its "optimizer" section'
        if not any(spec.requires_grad for spec in self.propagator.stage_model.specs):
            instead = (
                "no parameter that requires gradients; call requires_grad_(True) on what shall be trained, before "
                "ds_hydra.initialize"
            )
        return HydraConfigError(
            f"train_batch() was called and the engine has {instead}; engine.eval_batch(examples) and "
            "engine.score(examples) need none"
        )

    def _find_offloaded(self, kind: Literal["train", "eval"]) -> HydraConfigError | None:
        """The error that names offloaded states that an iteration needs; None without any."""
        offloaded = {state.value for state in getattr(self.optimizer, "offloaded_states", ())}
        if kind == "eval":
            # Passes without a step read nothing else
            offloaded &= {OffloadStateTypeEnum.lp_params.value}
        if not offloaded:
            return None
        return HydraConfigError(
            f"{', '.join(sorted(offloaded))} are offloaded (offload_states); call engine.reload_states() first"
        )

    def _find_refrozen(self) -> HydraConfigError | None:
        """The error where `requires_grad` of a parameter has changed; None where it has not. Link
        plans and ZeRO-3's own groups were fixed at initialisation.
        """
        for param, spec in zip(
            self.propagator.stage_model.params, self.propagator.stage_model.specs, strict=True
        ):
            if param.requires_grad != spec.requires_grad:
                return HydraConfigError(
                    f"{spec.fqn}.requires_grad is {param.requires_grad} and was {spec.requires_grad} at "
                    "initialisation; set it before ds_hydra.initialize, or before the Trainer's train()"
                )
        return None

    def _zero_gradient_shards(self) -> list[Tensor]:
        """This rank's fp32 gradient shards, set to zero."""
        if self._gradients is None:
            params = self.propagator.stage_model.params
            self._gradients = GradientShards(self.optimizer, params, self.device)
        return self._gradients.zeroed()

    def _step_or_skip(self, outcomes: Outcomes) -> None:
        # In fp16 an overflow is DeepSpeed's to see: it also lowers the loss scale
        if outcomes.nonfinite_ranks and not self.fp16_enabled():
            self._skip_step(outcomes.own.plan, outcomes.nonfinite_ranks)
            return
        with self.propagator.recorder.span(EventKind.STEP):
            self._gradients.deposit()
            self._step(outcomes)

    def _step(self, outcomes: Outcomes) -> None:
        # DeepSpeed counts train_batch_size() samples per step; monitors shall see what was trained.
        more = len(outcomes.own.plan.lengths) - self.train_batch_size()
        self.global_samples += more
        # An iteration is one step, whatever gradient_accumulation_steps says
        self.set_gradient_accumulation_boundary(True)
        # `_skip_step` may have left it True, and DeepSpeed looks for overflow in fp16 only
        self.optimizer.overflow = False
        steps = self.global_steps
        try:
            super().step()
        except BaseException:
            # Counted by DeepSpeed the step has been taken, and its samples with it
            if self.global_steps == steps:
                self.global_samples -= more
            raise
        finally:
            # Without this a later plain step() would take every micro-step for a boundary.
            self._is_gradient_accumulation_boundary = None

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        super()._configure_optimizer(client_optimizer, model_parameters)
        stepped = getattr(self.optimizer, "optimizer", None)
        if isinstance(stepped, torch.optim.Adagrad):
            # DeepSpeed's new one has one group, and no schedule knows it: its states are all it has
            self.basic_optimizer.state = stepped.state
            self.optimizer.optimizer = self.basic_optimizer

    def _take_model_step(self, lr_kwargs: Any) -> None:
        """DeepSpeed's, which would give the batch size to a schedule that wants a metric."""
        scheduler = self.lr_scheduler
        if needs_metric(scheduler):
            self.lr_scheduler = None
        try:
            super()._take_model_step(lr_kwargs)
        finally:
            self.lr_scheduler = scheduler

    def _skip_step(self, plan: IterationPlan, ranks: Sequence[int]) -> None:
        """Count an iteration without changing a weight, as DeepSpeed does after an overflow in
        fp16.

        In bf16 and fp32 some versions of DeepSpeed would step, and every weight would be NaN from
        then on.
        """
        if self.global_rank == 0:
            logger.warning(
                f"iteration {plan.iteration}: NaN or Inf among the gradients of ranks {list(ranks)}; "
                f"no weight was changed ({self.skipped_steps + 1} steps skipped so far)"
            )
        self.global_samples += len(plan.lengths)
        self.global_steps += 1
        self.micro_steps += 1
        self.skipped_steps += 1
        self._step_applied = False
        self.optimizer.overflow = True  # accelerate asks for it: a schedule stays where it is, too
        self._global_grad_norm = math.inf

    def _watch_sigterm(self) -> None:
        """Save on SIGTERM from now on, where the configuration asks for it and there is something
        to save. Raises HydraConfigError where the folder cannot be saved to.
        """
        folder = self._hydra_config.faults.save_on_sigterm
        if folder and self._find_untrained() is None:
            commits = self.global_rank == self._ranks_sharing_a_folder()[0]
            key = "hydra.faults.save_on_sigterm"
            try_folder(Path(folder), key, self.device, commits=commits)
            SIGTERM.watch(self, self.device)

    def look_for_sigterm(self) -> None:
        """Save and end where any rank got SIGTERM, as `train_batch` does after its iteration.
        Collective over all ranks.
        """
        if SIGTERM.is_watching(self):
            self._stop_if(any(gather_flags(SIGTERM.is_asked(self), self.device)))

    def leave_sigterm(self) -> None:
        """Restore the handler of SIGTERM from before this engine watched it. Not collective."""
        SIGTERM.leave(self)

    def _stop_if(self, is_asked: bool) -> None:
        if not is_asked:
            return
        if self.on_sigterm is not None:
            self.on_sigterm()
            return
        save_dir = str(self._hydra_config.faults.save_on_sigterm)
        self.save_checkpoint(save_dir)
        self.end_on_sigterm(save_dir)

    def end_on_sigterm(self, save_dir: str) -> NoReturn:
        """End this process, whose checkpoint in `save_dir` is written. Collective over all
        ranks.
        """
        self.wait_for_checkpoint()
        if self.global_rank == 0:
            logger.info(f"SIGTERM: saved step {self.global_steps} in {save_dir}, ending")
        # Destroyed inside: the former handler, called at the end, may end the process
        with SIGTERM.answering():
            self.destroy()
        raise SystemExit(0)

    def _report(
        self,
        planned: PlannedIteration,
        outcomes: Outcomes,
        stamps: Stamps,
        loss: float,
    ) -> None:
        self.last_plan = planned.plan
        grad_norm, num_samples = self.get_global_grad_norm(), self.global_samples
        if self.device.type == "cpu" and grad_norm is not None:
            grad_norm = self._global_grad_norm = torch.tensor(float(grad_norm))

        def take(metrics: IterationMetrics) -> None:
            self._last_metrics = self._ended_metrics = metrics
            if self.monitor.enabled and self.global_rank == 0:
                self.monitor.write_events(metrics.monitor_events(num_samples))

        self._last_metrics = self.reporter.report(
            planned,
            outcomes,
            stamps,
            loss=loss,
            lr=float(self.get_lr()[0] or 0.0),
            skipped_steps=self.skipped_steps,
            grad_norm=grad_norm,
            take=take,
        )

    def _check_partitions(self, stage_model: StageModel) -> None:
        """The plain ZeRO-3 layout over all ranks is the one that links are planned for."""
        world = deepspeed.comm.get_world_size()
        for param, spec in zip(stage_model.params, stage_model.specs, strict=True):
            if not hasattr(param, "ds_tensor"):
                raise HydraConfigError(
                    f"parameter {spec.fqn} is not partitioned: zero_optimization.stage must be 3 and the model "
                    "must not share parameters with another engine"
                )
            # Rounds are planned for this length: with another one they would move wrong elements
            if param.ds_tensor.numel() != spec.shard_numel(world):
                raise UnsupportedModelError(
                    f"parameter {spec.fqn} of {spec.numel} elements has a ZeRO-3 partition of "
                    f"{param.ds_tensor.numel()} elements, expected {spec.shard_numel(world)} (numel / {world} "
                    "ranks, rounded up); remove what changes the partitioning: keys of zero_optimization, mpu="
                )

    def _complete_optimizer(self, stage_model: StageModel) -> None:
        """Check that the optimizer steps all trained parameters; give it the fields that schedules
        of transformers read.
        """
        if not hasattr(self.optimizer, "fp16_groups"):
            return  # evaluation alone needs none
        # By identity: ZeRO-3 steps the very parameters of the model
        stepped = {id(param) for group in self.optimizer.fp16_groups for param in group}
        adapters.check_optimizer(self.basic_optimizer)
        pairs = zip(stage_model.params, stage_model.specs, strict=True)
        trained = [(param, spec.fqn) for param, spec in pairs if param.requires_grad]
        if left_out := [fqn for param, fqn in trained if id(param) not in stepped]:
            raise HydraConfigError(
                f"the optimizer has {len(trained) - len(left_out)} of {len(trained)} trainable parameters, without "
                f"{', '.join(left_out[:3])}{', ...' if len(left_out) > 3 else ''}; give it all that require gradients, "
                "or call requires_grad_(False) on the others"
            )
        self.optimizer.defaults = self.basic_optimizer.defaults
        self._release_what_is_gathered()

    def _release_what_is_gathered(self) -> None:
        """Spare ZeRO-3 the walks through all modules before each step, in which it releases
        parameters that are gathered: those of evaluation, as passes of training gather none.
        """
        # Weakly: the optimizer will hold the function that holds this
        optimizer, kind = weakref.ref(self.optimizer), type(self.optimizer)
        params = [p for p in self.module.parameters() if hasattr(p, "ds_active_sub_modules")]

        def release() -> None:
            if any(
                p.ds_status is not ZeroParamStatus.NOT_AVAILABLE or p.ds_active_sub_modules
                for p in params
            ):
                kind._partition_all_parameters(optimizer())

        if hasattr(kind, "_partition_all_parameters"):
            self.optimizer._partition_all_parameters = release


def needs_metric(scheduler: Any) -> bool:
    """Whether `scheduler.step` has to be told something, as that of ReduceLROnPlateau has: then who
    evaluates calls it, and no iteration does.
    """
    step = getattr(scheduler, "step", None)
    if step is None:
        return False
    parameters = inspect.signature(step).parameters.values()
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )


def _check_dtypes(model: nn.Module, config: Any) -> None:
    """Say which parameters DeepSpeed casts, where routers or adapters are in fp32 beside others in
    16 bit. Raises UnsupportedModelError for several dtypes that nothing casts.
    """
    of_dtypes: dict[torch.dtype, list[str]] = {}
    for name, param in model.named_parameters():
        if not is_quantised(param):  # refused by name where the model is copied
            of_dtypes.setdefault(param.dtype, []).append(name)
    if len(of_dtypes) < 2:
        return
    found = ", ".join(
        f"{len(names)} in {dtype} ({names[0]}{', ...' if len(names) > 1 else ''})"
        for dtype, names in of_dtypes.items()
    )
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}
    enabled = {"bf16": "bfloat16_config", "fp16": "float16_config"}
    kind = next((k for k, name in enabled.items() if getattr(config, name).enabled), None)
    if kind is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has parameters of several dtypes: {found}; set bf16.enabled in the DeepSpeed "
            "config, which casts all of them, or cast the model to one, e.g. model.to(torch.float32)"
        )
    if deepspeed.comm.get_rank() == 0:
        logger.info(
            f"{type(model).__name__} has parameters of several dtypes: {found}; all are cast to {wanted[kind]}, "
            f"because {kind} is enabled, and the optimizer keeps fp32 copies of them"
        )
