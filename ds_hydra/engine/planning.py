"""Making of an iteration: sequences of the data or of the caller, a plan that rank 0 makes ahead
and one broadcast tells, rows on the ranks that need them. Errors are raised on all ranks.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from ds_hydra.configs.hydra_config import HydraConfig, PlannerConfig
from ds_hydra.engine.candidates import EngineCandidates
from ds_hydra.engine.examples import (
    check_examples,
    check_same_data,
    fetch_examples,
    fingerprint_tensors,
    refuse_by_hand,
)
from ds_hydra.engine.iteration import Iteration
from ds_hydra.engine.losses.loss import CrossEntropy, Fields, Loss
from ds_hydra.engine.losses.objective import Objective, read_by
from ds_hydra.engine.model.micro_batches import Example
from ds_hydra.engine.propagation import Propagator
from ds_hydra.engine.ranks.agreement import (
    broadcast_bytes,
    on_all_ranks,
    restore_error,
    run_together,
)
from ds_hydra.engine.ranks.watchdog import CALL_BYTES, call_together
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.background import LOOKAHEAD, BackgroundPlanner, PlannedIteration
from ds_hydra.sampler.data.batches import SamplerState, TokenBudgetSampler, budget_of
from ds_hydra.sampler.data.dataset import SizeArray, TokenDataset
from ds_hydra.sampler.data.examples import to_examples
from ds_hydra.sampler.data.stream import StreamReader, StreamSampler, TokenStream
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.sampler.planner.iteration import plan_task
from ds_hydra.sampler.planner.planner_settings import PlanningTask
from ds_hydra.strategy import Strategy
from ds_hydra.strategy.profiles.learned import NO_CORRECTIONS, Corrections

logger = logging.getLogger(__name__)

ExampleLike = Mapping[str, Any]
"""One sequence: "input_ids" and optionally "labels" (not shifted, -100 where nothing is
predicted), masks and "attention_mask" (see sampler/data/examples.py).
"""


_STATE_SCHEMA = "ds_hydra.state/1"

_FIRST_DEADLINE_S = 600.0
"""Seconds for the first plan, which may wait for compilation. A planning process that hangs is not
waited for for ever.
"""


class IterationSource:
    """Source of iterations: global batches of the attached data, or given ones, with the plans that
    rank 0 makes. Methods are collective over all ranks unless they say otherwise.
    """

    def __init__(self, config: HydraConfig, propagator: Propagator):
        self._config, self._propagator = config, propagator
        self.candidates = EngineCandidates(config, propagator)
        self._stage_model, self._device = propagator.stage_model, propagator.device
        self.data: TokenDataset | TokenStream | None = None
        self.sampler: TokenBudgetSampler | None = None
        self._feed: PlanFeed | None = None
        self._prefetcher = RowPrefetcher(self._device)
        self._next_iteration: int | None = None
        """The iteration that a checkpoint continues with; None where the sampler stands."""
        self._loaded_position: tuple[Mapping[str, Any] | None, int, bool] | None = None
        """Position in the data, iteration and whether a position is wanted, of a checkpoint, until
        there is data.
        """
        self._given: tuple[SamplerState, SamplerState] | None = None
        """Two positions in the data. The second one, after the last trained global batch of
        `iterate_examples`, holds as long as the sampler is at the first one.
        """

    def attach(self, data: TokenDataset | TokenStream) -> None:
        """Draw global batches from `data` from now on."""
        if isinstance(data, TokenStream):
            self._attach_stream(data)
            return

        def make_sampler() -> TokenBudgetSampler:
            # At the start, and not in the iteration that draws a wrong row
            data.check_vocabulary(self._stage_model.vocab_size, self._stage_model.num_logits)
            wanted = self._config.tokens_per_iteration
            budget = budget_of(data.lengths, wanted)
            if budget < wanted and self._propagator.rank == 0:
                logger.warning(
                    f"the dataset has {budget} tokens, fewer than hydra.tokens_per_iteration = {wanted}: an iteration "
                    "trains each row once, and is an epoch; for several iterations in an epoch lower "
                    "hydra.tokens_per_iteration"
                )
            return TokenBudgetSampler(
                data.lengths,
                data.num_label_tokens,
                budget,
                seed=self._config.seed,
                shuffle=self._config.shuffle,
                token_digest=data.digest_tokens(),
            )

        sampler = run_together(make_sampler, self._device)
        check_same_data(sampler, self._device)
        self._use(data, sampler, data.lengths)

    def _attach_stream(self, data: TokenStream) -> None:
        """Let rank 0 read `data`; all learn the lengths of its first window."""
        config, model = self._config, self._stage_model
        budget = config.tokens_per_iteration

        def make_sampler() -> tuple[StreamSampler, list[int]]:
            # Others follow the plans, and know of the stream only how far it is trained
            if self._propagator.rank != 0:
                return StreamSampler(None, budget), []
            reading = replace(
                data.reading, num_inputs=model.vocab_size, num_labels=model.num_logits
            )
            reader = StreamReader(
                data.stream,
                reading,
                window_tokens=config.stream_window * budget,
                seed=config.seed,
                shuffle=config.shuffle,
            )
            sampler = StreamSampler(reader, budget)
            lengths = [len(input_ids) for input_ids, _ in sampler.first_window()]
            logger.info(
                f"training data: a stream, whose first {len(lengths):,} sequences have {sum(lengths):,} tokens, "
                f"longest {max(lengths):,}"
            )
            return sampler, lengths

        sampler, first = run_together(make_sampler, self._device)
        # All ranks check what candidates hold against the same lengths
        payload = broadcast_bytes(np.array(first, np.int32).tobytes(), 0, self._device)
        # Nobody knows the longest to come: a candidate has to fit what the context admits
        lengths = np.append(np.frombuffer(payload, np.int32), np.int32(config.context_length))
        self._use(data, sampler, lengths)

    def _use(
        self, data: TokenDataset | TokenStream, sampler: TokenBudgetSampler, lengths: SizeArray
    ) -> None:
        self.close_feed()
        self._close_stream()
        self.data, self.sampler = data, sampler
        self._given = None
        self.candidates.lengths = lengths
        self._take_position()

    def _close_stream(self) -> None:
        if isinstance(self.sampler, StreamSampler):
            self.sampler.close()

    def next(self, problem: Exception | None = None, loss: Loss | None = None) -> Iteration:
        """The next global batch of this engine's own sampler, planned, for a `loss` of tokens that
        reads no fields; `problem`, what this rank has found wrong before, is raised on all.
        """
        error: HydraConfigError | None = None
        if self.sampler is None or self.data is None:
            error = HydraConfigError(
                "train_batch() without a batch needs training data: pass training_data=dataset to "
                "ds_hydra.initialize, or call train_batch(batch=examples)"
            )
        call_together("train_batch()", self._device, error)
        assert self.sampler is not None
        assert self.data is not None
        # After the agreement: a first call measures a profile, collectively
        feed = self.start()
        if self._next_iteration is None:
            self._next_iteration = self.sampler.state.iteration
        iteration = self.sampler.state.iteration
        planned, fetched = self._prefetcher.take(feed, iteration)
        plan = planned.plan
        # Before a rank can fail on its own: all stand at the same sequence afterwards.
        self.sampler.advance(len(plan.lengths))
        examples: Rows = self._share(plan) if isinstance(self.sampler, StreamSampler) else {}
        try:
            self._stage_model.check_unchanged()
            if not examples:
                examples = self._fetch(plan) if fetched is None else fetched.result()
        except Exception as caught:  # whatever the user's data raise, the other ranks wait
            problem = problem or caught
        self._propagator.check_plan(plan, problem=problem)
        self._prefetcher.prefetch(self._fetch)
        objective = None
        if loss is not None and not _is_plain(loss):
            fields: list[Fields] = [{}] * len(plan.lengths)
            objective = Objective(loss=loss, normaliser=plan.num_label_tokens, fields=fields)
        return Iteration(planned, examples.__getitem__, objective)

    def _fetch(self, plan: IterationPlan) -> Rows:
        """The rows of `plan` that this rank needs; not collective."""
        assert isinstance(self.data, TokenDataset)
        mine = plan.on_rank(self._propagator.rank)
        # Stages between the first and the last see activations alone
        needed = [position for phase in mine if phase.reads_tokens for position in phase.positions]
        return fetch_examples(self.data, plan, needed)

    def _share(self, plan: IterationPlan) -> Rows:
        """The rows of `plan`, which rank 0 has read, on every rank. Collective over all ranks."""
        assert isinstance(self.sampler, StreamSampler)
        payload = b""
        if self._propagator.rank == 0:
            pairs = zip(*(self.sampler[index] for index in plan.sample_indices), strict=True)
            # Inputs and labels in one message of int32, which every vocabulary fits
            payload = np.stack([np.concatenate(column) for column in pairs]).tobytes()
        payload = broadcast_bytes(payload, 0, self._device)
        tokens = torch.frombuffer(bytearray(payload), dtype=torch.int32).view(2, -1)
        parts = tokens.long().split(list(plan.lengths), dim=1)
        return {position: (part[0], part[1]) for position, part in enumerate(parts)}

    def start(self) -> PlanFeed:
        """Plan the global batches to come, on rank 0's host, if that is not under way; measures a
        missing profile.
        """
        assert self.sampler is not None
        if self._feed is None:
            self.candidates.fit_to_data()  # first: it may add schemes to the profile
            strategies, profile = self.candidates.strategies, self.candidates.ensure_profile()
            is_first = self._propagator.rank == 0
            self._feed = PlanFeed(
                self.sampler,
                self.candidates.task(strategies, profile) if is_first else None,
                self.candidates.track().corrections_for,
                self._config.planner,
                # Where the host computes, reading rows beside it would only take its time.
                tells_next=self._device.type != "cpu" and isinstance(self.data, TokenDataset),
            )
        return self._feed

    def plan(
        self,
        examples: Sequence[ExampleLike],
        strategy: str | Strategy | None,
        iteration: int,
        problem: Exception | None = None,
        loss: Loss | None = None,
        *,
        call: str = "plan()",
        forward_only: bool = False,
        only_scored: bool = False,
    ) -> Iteration:
        """A plan for a given global batch, the same list on every rank, optionally of one
        strategy and for one loss.

        `call` is the engine's method; `problem` as in `next`, `only_scored` as in `check_examples`.
        `forward_only` is for passes without backward, which hold longer micro-batches.
        """
        forced: Strategy | None = None
        tensors, batch, objective = [], None, None
        try:
            if strategy is not None:
                forced = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
                if not isinstance(forced, Strategy):
                    raise HydraConfigError(
                        f'strategy is {strategy!r:.80}, expected text such as "2x<1,1>", or a Strategy'
                    )
                self.candidates.check_strategy(forced)
            self._stage_model.check_unchanged()
            tensors = [
                (torch.from_numpy(input_ids), torch.from_numpy(labels))
                for input_ids, labels in to_examples(examples, read_by(loss))
            ]
            batch = check_examples(
                tensors,
                iteration,
                context_length=self._config.context_length,
                vocab_size=self._stage_model.vocab_size,
                num_logits=self._stage_model.num_logits,
                only_scored=only_scored,
            )
            if loss is not None and not _is_plain(loss):
                labels = [labels for _, labels in tensors]
                objective = Objective.read(loss, examples, labels, self._stage_model.num_logits)
        except Exception as caught:  # whatever the examples raise, the other ranks wait
            problem = problem or caught
        if forced is not None:
            call = f"{call} of {forced}"
            if len(call) > CALL_BYTES:
                # Cut with a checksum: two long strategies may differ in what is cut off
                call = f"{call[: CALL_BYTES - 9]} {crc32(call.encode()):08x}"
        # In the exchange of what is called: one for both
        call_together(call, self._device, problem)
        assert batch is not None
        if forced is None:
            # First: measuring may leave out candidates.
            profile = self.candidates.ensure_profile()
            strategies = self.candidates.strategies
        else:
            # Groups are made collectively, so before a rank plans alone
            self._propagator.prepare([forced])
            # Does not wait for a measurement: any cost model can only place sequences in it.
            profile, strategies = self.candidates.profile_for_forced(forced), (forced,)
        tracker = self.candidates.find_tracker()
        corrections = tracker.corrections_now(strategies) if tracker else NO_CORRECTIONS

        def plan_now() -> PlannedIteration:
            start = time.perf_counter()
            task = self.candidates.task(strategies, profile, forward_only=forward_only)
            plan = plan_task(task, batch, corrections)
            planning_ms = (time.perf_counter() - start) * 1e3
            return PlannedIteration(
                plan=plan,
                planning_ms=planning_ms,
                waited_ms=planning_ms,
                source="inline",
                corrections=corrections,
            )

        planned = broadcast_plan(plan_now, self._device)
        self._propagator.check_plan(planned.plan, fingerprint_tensors(tensors), objective=objective)
        return Iteration(planned, tensors.__getitem__, objective, [labels for _, labels in tensors])

    def iterate_examples(self) -> Iterator[list[dict[str, Any]]]:
        """Global batches from where training is, as lists of examples, without drawing them; not
        collective. Where `train_batch` was given the list itself it counts as trained, and the
        next iterator goes on after it.
        """
        assert self.sampler is not None
        if not isinstance(self.data, TokenDataset):
            raise HydraConfigError(
                "the training data is a stream, which rank 0 alone reads: call engine.train_batch() without a batch, "
                "in place of a loop over global batches"
            )
        state = self._after_given() or self.sampler.state
        while True:
            batch, state = self.sampler.draw(state)
            yield _ReadBatch(self.data, batch.sample_indices, state)

    def mark_trained(self, plan: IterationPlan, examples: Any = None) -> None:
        """The weights have seen `plan`, of the data, or of given `examples`, perhaps those of
        `iterate_examples`: a checkpoint continues after it; not collective.
        """
        if examples is None:
            self._next_iteration = plan.iteration + 1
            if isinstance(self.sampler, StreamSampler):
                self.sampler.forget_before(plan.iteration + 1)
        elif isinstance(examples, _ReadBatch) and examples.data is self.data:
            assert self.sampler is not None
            # The sampler itself has not moved: it holds until a draw of its own
            self._given = self.sampler.state, examples.after

    def _after_given(self) -> SamplerState | None:
        if self._given is None or self.sampler is None or self._given[0] != self.sampler.state:
            return None
        return self._given[1]

    def _take_position(self) -> None:
        """Let the data that is attached begin where a checkpoint that was loaded says."""
        sampler = self.sampler
        if sampler is None or self._loaded_position is None:
            return
        state, iteration, is_wanted = self._loaded_position
        if state is not None:
            run_together(lambda: sampler.load_state_dict(state), self._device)
        else:
            sampler.begin_at(iteration)
            if is_wanted and self._propagator.rank == 0:
                logger.warning(
                    "the checkpoint has no position in the data (another trainer saved it, or it was trained with "
                    "given global batches): the data begins at its first sequence again; leave out what was seen, for "
                    "example with dataset.skip(n)"
                )
        given = state and state.get("given")
        self._given = (sampler.state, SamplerState(**given)) if given else None
        # Once: data that are attached later begin anew
        self._next_iteration = self._loaded_position = None

    def close_feed(self) -> None:
        """Stop planning ahead; not collective."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        self._prefetcher.cancel()

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: cost model, position in the data, and the configuration of both;
        not collective.
        """
        state: dict[str, Any] = {
            "schema": _STATE_SCHEMA,
            "num_ranks": self._propagator.num_ranks,
            "seed": self._config.seed,
            "config": self._config.model_dump(mode="json"),
            "config_digest": self._config.digest,
            **self.candidates.state_dict(),
        }
        if self.sampler is not None:
            position = state["sampler"] = self.sampler.state_dict(self._next_iteration)
            if given := self._after_given():
                position["given"] = asdict(given)
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], iteration: int = 0, *, position: bool = True
    ) -> None:
        """Continue the global batches where `state` was taken, with the plans that would have been
        made; without `position`, or where `state` has none, the data from its beginning, as
        `iteration` and those after it.
        """
        self._warn_of_changes(state)
        self.close_feed()
        # Kept where no data is attached yet, which then begins there
        self._loaded_position = state.get("sampler") if position else None, iteration, position
        self._take_position()
        self.candidates.load_state_dict(state)

    def _warn_of_changes(self, state: Mapping[str, Any]) -> None:
        digest = self._config.digest
        if self._propagator.rank != 0 or state.get("config_digest", digest) == digest:
            return
        saved, now = state.get("config", {}), self._config.model_dump(mode="json")
        changes = [
            f"hydra.{key} was {saved.get(key)!r}, now {now.get(key)!r}"
            for key in sorted(now.keys() | saved.keys())
            if saved.get(key) != now.get(key)
        ]
        logger.warning("resumed with another configuration: %s", "; ".join(changes))

    def close(self) -> None:
        """Stop planning and fetching ahead. Safe to call twice; not collective."""
        self.close_feed()
        self._close_stream()


class _ReadBatch(list[dict[str, Any]]):
    """Examples of `data`, which stand at `after` once these are trained."""

    def __init__(self, data: TokenDataset, indices: Sequence[int], after: SamplerState):
        super().__init__(data[index] for index in indices)
        self.data, self.after = data, after

    def keys(self) -> NoReturn:
        """Refuse the beginnings of a loop of one's own: `engine(**batch)`, `batch.items()`."""
        refuse_by_hand(
            "a global batch, a list of examples, was taken for columns of engine(**batch)"
        )

    items = keys

    def __getitem__(self, place: Any) -> Any:
        """Return the example at `place`; refuse the name of a column."""
        return self.keys() if isinstance(place, str) else super().__getitem__(place)


def _is_plain(loss: Loss) -> bool:
    """Whether `loss` is the engine's own without one."""
    return isinstance(loss, CrossEntropy) and loss.is_plain


class PlanFeed:
    """Plans of the sampler's batches, `LOOKAHEAD` iterations ahead of the one that trains; rank 0
    only works.

    The sampler's own stream stays where training is: the feed draws ahead with
    `TokenBudgetSampler.draw`, and nobody else draws: all ranks go on past what its plans hold.
    """

    def __init__(
        self,
        sampler: TokenBudgetSampler,
        task: PlanningTask | None,
        corrections_for: Callable[[int], Corrections],
        config: PlannerConfig,
        *,
        tells_next: bool,
    ):
        """`task` is None where nothing is planned; `corrections_for(iteration)` of its profile are
        asked for when it is submitted. `tells_next`: whether `peek` tells anything.
        """
        self._sampler = sampler
        self._ahead = sampler.state
        self._failure: Exception | None = None
        self._corrections_for, self._tells_next = corrections_for, tells_next
        # Only a stalled worker gets there; plans that depend on timing are not reproducible
        self._deadline_s = _FIRST_DEADLINE_S if config.refit == "log" else 10.0
        self._planner = task and BackgroundPlanner(
            task,
            num_workers=config.num_workers,
            deadline_s=_FIRST_DEADLINE_S,
        )
        self._submit_until(self._ahead.iteration + LOOKAHEAD)

    def get(self, iteration: int) -> PlannedIteration:
        """The plan of the next iteration; keeps the lookahead filled."""
        assert self._planner is not None, "only rank 0 plans"
        self._submit_until(iteration + LOOKAHEAD, needed=iteration + 1)
        # Drawing has failed before this iteration, and its turn has come
        if iteration >= self._ahead.iteration:
            assert self._failure is not None
            raise self._failure
        planned = self._planner.get(iteration)
        # The first plan is there, and with it what was compiled
        self._planner.deadline_s = self._deadline_s
        return planned

    def peek(self, iteration: int) -> dict[str, Any] | None:
        """The document of a plan that is made and not yet asked for by `get`, else None."""
        return self._planner.peek(iteration) if self._planner and self._tells_next else None

    def _submit_until(self, iteration: int, needed: int = 0) -> None:
        """Submit the global batches before `iteration`; waits for a stream before `needed` only."""
        while self._planner is not None and self._ahead.iteration < iteration:
            # Plans ahead are worth no wait: the stream may be read while this iteration trains
            if self._ahead.iteration >= needed and not self._sampler.can_draw(self._ahead):
                return
            try:
                batch, self._ahead = self._sampler.draw(self._ahead)
            except Exception as error:  # whatever a stream raises: on all ranks when its turn comes
                self._failure = error
                return
            self._planner.submit(batch, self._corrections_for(batch.iteration))

    def close(self) -> None:
        """Stop the planning processes."""
        if self._planner is not None:
            self._planner.close()


Rows = dict[int, Example]
"""Rows by position in the plan."""


class RowPrefetcher:
    """Prefetch of rows, one iteration ahead of a feed: `take` returns this iteration's plan,
    `prefetch` has a thread fetch the rows of the next one, where its plan was sent.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._next_plan: tuple[int, Mapping[str, Any]] | None = None
        """The next iteration and its document, until `prefetch`."""
        self._prefetched: _Prefetched | None = None

    def take(self, feed: PlanFeed, iteration: int) -> tuple[PlannedIteration, Future[Rows] | None]:
        """The plan of `iteration`, and its rows if they were fetched ahead. Collective over all
        ranks.
        """
        held = self._prefetched
        # Before anything can fail: what was fetched serves this one iteration only
        self.cancel()
        if held is not None and held.iteration != iteration:
            held = None
        known = None if held is None else held.plan.result
        planned, document = broadcast_plans(feed, iteration, known, self._device)
        if document is not None:
            self._next_plan = iteration + 1, document
        return planned, None if held is None else held.rows

    def prefetch(self, fetch: Callable[[IterationPlan], Rows]) -> None:
        """Prefetch the next iteration's rows beside this iteration: `fetch` gives a plan's rows
        that this rank needs. Not collective.
        """
        if self._next_plan is not None:
            iteration, document = self._next_plan
            ahead = self._prefetched = _Prefetched(iteration, Future(), Future())

            def work() -> None:
                # Parsed here, beside training: the document was sent an iteration ahead
                _settle(ahead.plan, lambda: PlannedIteration.from_json(document))
                _settle(ahead.rows, lambda: fetch(ahead.plan.result().plan))

            # A daemon: a row that never comes must not keep the process from ending.
            threading.Thread(target=work, name="ds_hydra-rows", daemon=True).start()

    def cancel(self) -> None:
        """Drop what was prefetched: other plans will come. All ranks call it together."""
        self._next_plan = self._prefetched = None


class _Prefetched(NamedTuple):
    """Plan and rows of the next iteration, from a thread."""

    iteration: int
    plan: Future[PlannedIteration]
    rows: Future[Rows]


def _settle(future: Future[Any], job: Callable[[], Any]) -> None:
    try:
        future.set_result(job())
    # Whatever it is: who waits for the future would wait for ever.
    except BaseException as error:
        future.set_exception(error)


def broadcast_plan(make: Callable[[], PlannedIteration], device: torch.device) -> PlannedIteration:
    """Make a plan on rank 0 and return it on every rank; an error of rank 0 is raised on every
    rank. Collective over all ranks.
    """
    return PlannedIteration.from_json(_from_first_rank(lambda: make().to_json(), device))


def broadcast_plans(
    feed: PlanFeed,
    iteration: int,
    known: Callable[[], PlannedIteration] | None,
    device: torch.device,
) -> tuple[PlannedIteration, dict[str, Any] | None]:
    """The plan of `iteration`, which every rank has as `known` if it was sent before, and the
    document of the next one where that is ready. Errors as in `broadcast_plan`.

    Collective over all ranks.
    """

    def make() -> dict[str, Any]:
        planned = feed.get(iteration)
        # Every rank has the plan: only how long rank 0 has waited is news
        this = planned.to_json() if known is None else {"waited_ms": planned.waited_ms}
        return {"this": this, "next": feed.peek(iteration + 1)}

    document = _from_first_rank(make, device)
    this = document["this"]
    planned = PlannedIteration.from_json(this) if known is None else replace(known(), **this)
    return planned, document["next"]


def _from_first_rank(make: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """Return the document that rank 0 makes, on every rank. An error of rank 0 is raised on every
    rank.
    """
    document: dict[str, Any] = {}
    error = None
    if dist.get_rank() == 0:
        try:
            document = make()
        except Exception as caught:  # whatever it is, the other ranks wait for it
            error = caught
            # In the place of the document: the others wait in one broadcast, not in two
            document = {"error": [type(error).__name__, str(error)]}
    received = broadcast_bytes(json.dumps(document, separators=(",", ":")).encode(), 0, device)
    if error is not None:
        raise on_all_ranks(error)
    document = json.loads(received)
    if "error" in document:
        name, text = document["error"]
        raise on_all_ranks(restore_error(name, f"rank 0: {text}"))
    return document
