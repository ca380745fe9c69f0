"""What HydraEngine adds to DeepSpeedEngine: candidates, profile, plans, and the iteration itself.

The engine (`hydra_engine.py`) overrides DeepSpeed's methods; everything else lives in this collaborator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_hydra.configs.files import find_profile
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.metrics import RunLog
from ds_hydra.engine.planning import PlanFeed, broadcast_plan
from ds_hydra.engine.profiler import measure_profile, nominal_profile
from ds_hydra.engine.propagation import Example, LoadExample, Outcome, Propagator, gather_rows
from ds_hydra.engine.skeleton import Skeleton
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.background import PlannedIteration
from ds_hydra.sampler.batches import TokenBudgetSampler
from ds_hydra.sampler.dataset import TokenDataset
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.strategy import Profile, Strategy
from ds_hydra.strategy.candidates import enumerate_strategies, load_strategies, power_of_two_schemes

ExampleLike = Mapping[str, Any]
"""One sequence: "input_ids" and optionally "labels" (not shifted, -100 where nothing is predicted)."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """A plan that all ranks agree on, and where its sequences come from."""

    planned: PlannedIteration
    load: LoadExample

    @property
    def plan(self) -> IterationPlan:
        """The plan."""
        return self.planned.plan


class HydraRuntime:
    """Everything of ds_hydra on one rank. Methods are collective over all ranks unless they say otherwise."""

    def __init__(self, config: HydraConfig, skeleton: Skeleton, device: torch.device):
        self.config = config
        self.skeleton = skeleton
        skeleton.to_device(device)
        self._device = device
        self.propagator = Propagator(skeleton, device=device, max_groups=config.max_process_groups)
        self.num_ranks = self.propagator.num_ranks
        self.is_first_rank = self.propagator.rank == 0
        self.strategies = self._candidates()
        self.propagator.prepare(self.strategies)
        self._profile: Profile | None = None
        self._feed: PlanFeed | None = None
        self._data: TokenDataset | None = None
        self.sampler: TokenBudgetSampler | None = None
        self.log: RunLog | None = None
        if config.run_dir is not None and self.is_first_rank:
            self.log = RunLog(Path(config.run_dir), save_plans=config.save_plans)

    @property
    def profile(self) -> Profile:
        """The profile in use: the configured one, else measured now (which is collective)."""
        if self._profile is None:
            self._profile = self._find_profile()
        return self._profile

    def attach_data(self, data: TokenDataset) -> None:
        """Draw mini-batches from `data` from now on."""
        self._data = data
        self.sampler = TokenBudgetSampler(
            data.lengths,
            data.num_label_tokens,
            self.config.tokens_per_iteration,
            seed=self.config.seed,
            shuffle=self.config.shuffle,
        )

    def next_iteration(self) -> Iteration:
        """The next mini-batch of this engine's own sampler, planned."""
        if self.sampler is None or self._data is None:
            raise HydraConfigError(
                "train_batch() without a batch needs training data: pass training_data=dataset to "
                "ds_hydra.initialize, or call train_batch(batch=examples)"
            )
        feed = self.start_planning()
        batch = next(self.sampler)
        planned = broadcast_plan(lambda: feed.get(batch), self._device)
        self.propagator.check_plan(planned.plan, fingerprint(batch.sample_indices, batch.lengths))
        return Iteration(planned, self._load_from(self._data, planned.plan))

    def start_planning(self) -> PlanFeed:
        """Plan the mini-batches to come, on rank 0's host, if that is not under way; measures a missing profile."""
        assert self.sampler is not None
        if self._feed is None:
            self._feed = PlanFeed(
                self.sampler,
                strategies=self.strategies,
                profile=self.profile,
                num_ranks=self.num_ranks,
                config=self.config,
                plans_here=self.is_first_rank,
            )
        return self._feed

    def plan_examples(
        self, examples: Sequence[ExampleLike], strategy: Strategy | None, iteration: int
    ) -> Iteration:
        """A plan for a given global mini-batch, the same list on every rank, optionally of one strategy."""
        tensors = [_to_example(example, index) for index, example in enumerate(examples)]
        batch = self._check_examples(tensors, iteration)
        strategies = self.strategies if strategy is None else (strategy,)
        if strategy is not None:
            self.prepare_forced(strategy)
        # A forced strategy does not wait for a measurement: any cost model can only place sequences in it.
        profile = self.profile if strategy is None else self._profile_for_forced(strategy)
        planned = broadcast_plan(
            lambda: PlanFeed.plan_now(batch, strategies, profile, self.num_ranks, self.config), self._device
        )
        self.propagator.check_plan(planned.plan, fingerprint_tensors(tensors))
        return Iteration(planned, tensors.__getitem__)

    def prepare_forced(self, strategy: Strategy) -> None:
        """Check `strategy` and create its groups."""
        self._check_strategy(strategy)
        self.propagator.prepare([strategy])

    def train(self, iteration: Iteration, grads_P: Sequence[Tensor], loss_scale: float) -> Outcome:
        """Gradients of the iteration, added into `grads_P`."""
        return self.propagator.train(iteration.plan, iteration.load, grads_P, loss_scale)

    def gather_outcomes(self, outcome: Outcome) -> list[Outcome]:
        """Outcomes of all ranks, in rank order, on every rank."""
        fields = [outcome.loss_sum, outcome.pull_ms, outcome.propagate_ms, outcome.push_ms]
        mine = torch.tensor(fields, dtype=torch.float64, device=self._device)
        return [
            Outcome(loss_sum=loss, pull_ms=pull, propagate_ms=propagate, push_ms=push)
            for loss, pull, propagate, push in gather_rows(mine).tolist()
        ]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the sampler; empty without training data."""
        return {} if self.sampler is None else {"sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the mini-batches where `state` was taken."""
        if self.sampler is not None and "sampler" in state:
            self.close_feed()
            self.sampler.load_state_dict(state["sampler"])

    def close_feed(self) -> None:
        """Stop planning ahead; not collective."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def close(self) -> None:
        """Stop planning processes, close files; not collective. Safe to call twice."""
        self.close_feed()
        if self.log is not None:
            self.log.close()
            self.log = None

    def describe(self) -> str:
        """Candidates and communicators, for the start of a run."""
        names = ", ".join(str(s) for s in self.strategies)
        return (
            f"ds_hydra: {len(self.strategies)} candidate strategies on {self.num_ranks} ranks ({names}), "
            f"{len(self.propagator.groups)} process groups"
        )

    def _candidates(self) -> tuple[Strategy, ...]:
        if self.config.strategies is not None:
            strategies = load_strategies(self.config.strategies)
            for strategy in strategies:
                self._check_strategy(strategy)
            return strategies
        schemes = []
        for scheme in power_of_two_schemes(self.num_ranks):
            try:
                self.skeleton.check_scheme(scheme)
            except HydraConfigError:
                continue  # proposing leaves out what this model cannot run
            schemes.append(scheme)
        return enumerate_strategies(schemes, self.num_ranks)

    def _check_strategy(self, strategy: Strategy) -> None:
        if strategy.num_devices > self.num_ranks:
            raise HydraConfigError(
                f"strategy {strategy} needs {strategy.num_devices} ranks, there are {self.num_ranks}; change "
                f"hydra.strategies or start {strategy.num_devices} ranks"
            )
        for scheme in set(strategy.schemes):
            self.skeleton.check_scheme(scheme)

    def _find_profile(self) -> Profile:
        if self.config.profile is not None:
            document = Profile.load(find_profile(self.config.profile)).document
        else:
            document = measure_profile(self.propagator, self.strategies, self.config)
            if self.log is not None:
                self.log.write_profile(document)
        return _limit_memory(document, self.config.memory_limit_bytes)

    def _profile_for_forced(self, strategy: Strategy) -> Profile:
        if self._profile is not None or self.config.profile is not None:
            return self.profile
        return Profile.from_json(nominal_profile(self.skeleton, strategy.schemes))

    def _check_examples(self, tensors: Sequence[Example], iteration: int) -> GlobalBatch:
        if not tensors:
            raise HydraConfigError(
                "the global mini-batch is empty: train_batch(batch=examples) got 0 examples"
            )
        lengths = tuple(len(input_ids) for input_ids, _ in tensors)
        if max(lengths) > self.config.context_length:
            index = int(np.argmax(lengths))
            raise HydraConfigError(
                f"example {index} of the mini-batch has {lengths[index]} tokens, more than "
                f"hydra.context_length {self.config.context_length}; cut it, or set hydra.context_length to "
                f"{lengths[index]}"
            )
        num_label_tokens = sum(int((labels[1:] != -100).sum()) for _, labels in tensors)
        if not num_label_tokens:
            raise HydraConfigError(
                "no example of the mini-batch has a token to predict (labels are all -100)"
            )
        return GlobalBatch(
            iteration=iteration,
            sample_indices=tuple(range(len(tensors))),
            lengths=lengths,
            num_label_tokens=num_label_tokens,
        )

    @staticmethod
    def _load_from(data: TokenDataset, plan: IterationPlan) -> LoadExample:
        def load(position: int) -> Example:
            example = data[plan.sample_indices[position]]
            return torch.from_numpy(example["input_ids"]), torch.from_numpy(example["labels"])

        return load


def fingerprint(*parts: Sequence[int]) -> int:
    """63-bit fingerprint of lists of integers."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(np.asarray(part, dtype=np.int64).tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1


def fingerprint_tensors(tensors: Sequence[Example]) -> int:
    """63-bit fingerprint of a mini-batch's tokens and labels."""
    digest = hashlib.blake2b(digest_size=8)
    for example in tensors:
        for tensor in example:
            digest.update(tensor.cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1


def _to_example(example: ExampleLike, index: int) -> Example:
    if "input_ids" not in example:
        raise HydraConfigError(
            f"example {index} of the mini-batch has keys {sorted(example)}, expected 'input_ids' (and 'labels')"
        )
    input_ids = torch.as_tensor(example["input_ids"], dtype=torch.int64).reshape(-1)
    labels = torch.as_tensor(example.get("labels", input_ids), dtype=torch.int64).reshape(-1)
    if labels.shape != input_ids.shape or not len(input_ids):
        raise HydraConfigError(
            f"example {index} of the mini-batch has {len(input_ids)} input_ids and {len(labels)} labels, "
            "expected the same number, at least one (labels not shifted)"
        )
    return input_ids, labels


def _limit_memory(document: Mapping[str, Any], memory_limit_bytes: int | None) -> Profile:
    """The profile, with the hardware's memory replaced by what the user allows a rank."""
    if memory_limit_bytes is not None:
        hardware = {
            **document["hardware"],
            "memory_bytes": memory_limit_bytes,
            "reserved_bytes": 0,
            "safety_margin_bytes": 0,
        }
        document = {**document, "hardware": hardware}
    return Profile.from_json(document)


def iterate_examples(runtime: HydraRuntime) -> Iterator[list[dict[str, Any]]]:
    """Global mini-batches of the runtime's data as lists of examples; not collective."""
    assert runtime.sampler is not None
    assert runtime._data is not None
    for batch in runtime.sampler:
        yield [runtime._data[index] for index in batch.sample_indices]
