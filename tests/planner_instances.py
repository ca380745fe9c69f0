"""Random planning problems, and properties of the planner: plans are legal and the same for equal
problems, none is faster than its lower bound or the simulator's, and more candidates do not make
them slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isclose
from random import Random
from types import SimpleNamespace

from reference import make_batch, make_profile

from ds_hydra.lab.simulator.scenario import perfect_balance_ms
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.sampler.planner.iteration import iteration_bound_ms, plan_strategy, plan_with_time
from ds_hydra.sampler.planner.phase_plan import PlanningProblem
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.strategy.profiles.learned import Corrections
from ds_hydra.strategy.profiles.profile import LinkTimes, Profile
from ds_hydra.strategy.schemes.placement import groups_of, groups_of_all
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

TOLERANCE = 0.05
"""Share by which more candidates may make a plan slower: the search goes step by step."""
_ROUNDING = 1e-9
_NUM_LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A global batch, devices, and strategies to choose among."""

    lengths: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    profile: Profile
    num_devices: int
    settings: PlannerSettings
    corrections: Corrections

    def planning(self) -> PlanningProblem:
        """Return the global batch as nobody has planned it yet."""
        batch = make_batch(list(self.lengths))
        return PlanningProblem(
            batch, self.profile, self.num_devices, self.settings, self.corrections
        )

    def time_ms(self, strategies: Sequence[Strategy]) -> float:
        """Return the time of the best plan over `strategies`; infinite where there is none."""
        planning = self.planning()
        if not any(planning.is_held(planning.longest(s)) for s in strategies):
            return inf
        return plan_with_time(planning, strategies)[1]


class _Links(dict[Strategy, LinkTimes]):
    """Pull and push of any strategy: those of its widest slices."""

    def __init__(self, pull_ms: float, push_ms: float) -> None:
        super().__init__()
        self.pull_ms, self.push_ms = pull_ms, push_ms

    def get(self, strategy: Strategy, default: object = None) -> LinkTimes:
        """Return what the slices of `strategy` take."""
        share = max(1 / (scheme.tp * scheme.pp) for scheme in strategy.schemes)
        return LinkTimes(pull_ms=self.pull_ms * share, push_ms=self.push_ms * share)


def random_problem(seed: int) -> Problem:
    """Return a problem whose schemes, T, MaxLen, lengths, links and settings are random."""
    rng = Random(seed)
    num_devices = rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
    schemes = _schemes(rng, num_devices)
    strategies = _strategies(rng, schemes, num_devices)
    max_len = rng.choice([30, 100, 1000])
    held = {}
    for scheme in schemes:  # the planner also tries weights that stay on the nodes
        held |= dict.fromkeys({scheme, scheme.staying}, _held_tokens(rng, scheme, max_len))
    corrections = Corrections(
        factors={own: rng.uniform(0.9, 1.2) for own in schemes},
        outside_ms={s: rng.choice([0.0, 5.0]) for s in strategies},
        slow_ranks=rng.choice([{}, {0: 1.2}]),
    )
    return Problem(
        lengths=_lengths(rng, max(held[s] for own in strategies for s in own.schemes)),
        strategies=strategies,
        profile=_profile(rng, schemes, max_len),
        num_devices=num_devices,
        settings=PlannerSettings(
            objective=rng.choice(["exact", "exact", "closed_form"]),
            solver="none",
            max_len_override=held,
            link_times=rng.choice([_Links(rng.uniform(0, 40), rng.uniform(0, 40)), {}]),
            overlaps_links=rng.choice([True, False]),
        ),
        corrections=rng.choice([corrections, Corrections(), Corrections()]),
    )


def _schemes(rng: Random, num_devices: int) -> list[Scheme]:
    """Return schemes that fit, half of them gathered, and of some gathered ones all widths."""
    found = {Scheme(1, 1), Scheme(1, 1, gather=True)}
    for _ in range(60):
        kind = rng.choice(["keep", "gather", "gather", "hpz"])
        is_gathered = kind in ("gather", "hpz")
        scheme = Scheme(
            rng.choice([1, 1, 2, 4, 8]),
            1 if is_gathered else rng.choice([1, 2, 3, 4]),
            sp=rng.choice([1, 1, 2, 4, 8, 16]),
            cp=rng.choice([1, 1, 1, 2, 3, 4, 5, 6, 7]),
            ckpt=rng.choice([0, 0, 2, _NUM_LAYERS]),
            gather=is_gathered,
            hpz=kind == "hpz",
        )
        if scheme.num_devices <= num_devices:
            found.add(scheme)
    for size in (2, 4, 8, 16, 32):
        if size <= num_devices and rng.random() < 0.7:
            found.add(Scheme(1, 1, sp=size, gather=True, ckpt=rng.choice([0, 0, 2])))
    return sorted(found)


def _strategies(rng: Random, schemes: Sequence[Scheme], num_devices: int) -> tuple[Strategy, ...]:
    """Return 2 to 12 strategies, two of three with pipelines of one scheme."""
    found = {}
    for _ in range(rng.randint(2, 12)):
        first = rng.choice(schemes)
        own = [first] * (num_devices // first.num_devices)
        if rng.random() < 1 / 3:
            del own[rng.randint(1, len(own)) :]
            beside = [s for s in schemes if s.gathering == first.gathering]
            while fitting := [
                s for s in beside if s.num_devices <= num_devices - sum(o.num_devices for o in own)
            ]:
                own.append(rng.choice(fitting))
        found[Strategy(tuple(own))] = None
    return tuple(found)


def _held_tokens(rng: Random, scheme: Scheme, max_len: int) -> int:
    """Return a MaxLen: more with more ranks and with checkpointed layers."""
    return max(1, int(max_len * scheme.num_devices * (1 + scheme.ckpt / 2) * rng.uniform(0.8, 1.1)))


def _profile(rng: Random, schemes: Sequence[Scheme], max_len: int) -> Profile:
    """Return a profile in which T may lack its quadratic, its linear or its constant part."""
    has = rng.choice([(1, 1, 1), (1, 1, 0), (0, 1, 1), (0, 1, 0), (1, 0, 1), (1, 0, 0), (0, 0, 1)])
    times = {}
    for scheme in schemes:
        ms = rng.uniform(1.0, 1.3) * (1 + 0.3 * scheme.ckpt / _NUM_LAYERS) / scheme.num_devices
        constant_ms = rng.choice([1.0, 20.0])
        times[str(scheme)] = (has[0] * ms / max_len, has[1] * ms, has[2] * constant_ms)
    document = dict(make_profile(times, num_layers=_NUM_LAYERS).document)
    traffic_ms = rng.choice([0.0, 0.0, 3.0, 30.0])
    for entry in document["schemes"]:
        if entry.get("hpz"):
            entry["traffic_ms"] = traffic_ms / 2
        elif entry.get("gather"):
            entry["traffic_ms"], entry["hpz_traffic_ms"] = traffic_ms, traffic_ms / 2
    ranks_per_core = rng.choice([1.0] * 7 + [2.0])
    document["hardware"] = {**document["hardware"], "ranks_per_core": ranks_per_core}
    return Profile.from_json(document)


def _lengths(rng: Random, longest: int) -> tuple[int, ...]:
    """Return lengths that are equal, of two kinds, or of a long tail."""
    number = rng.choice([1, 3, 10, 10, 40, 40, 40, 150])
    most = max(1, int(longest * rng.choice([0.05, 0.3, 0.6, 1.0])))
    drawn: dict[str, list[int]] = {
        "equal": [most],
        "two": [most] + [max(1, most // 7)] * 9,
        "tail": [min(most, 1 + int(most / 8 * rng.lognormvariate(0, 1))) for _ in range(number)],
    }
    return tuple(rng.choices(drawn[rng.choice(list(drawn))], k=number))


def wrong_bounds(problem: Problem) -> Iterator[str]:
    """Yield a sentence for each strategy whose lower bound is above the time of its own plan."""
    for strategy in problem.strategies:
        planning = problem.planning()
        bound_ms = iteration_bound_ms(planning, strategy)
        phase = plan_strategy(planning, strategy)
        time_ms = phase.iteration_ms if phase else inf
        if bound_ms > time_ms * (1 + _ROUNDING):
            yield f"the bound of {strategy} is {bound_ms} ms, its plan takes {time_ms} ms"
        for pipeline in phase.pipelines() if phase else ():
            if pipeline.lower_bound_ms > pipeline.makespan_ms * (1 + _ROUNDING):
                yield f"the bound of {pipeline} is above its time"
    yield from _wrong_balance(problem)


def _wrong_balance(problem: Problem) -> Iterator[str]:
    """Yield a sentence where propagation of the best plan is below the simulator's bound."""
    planning = problem.planning()
    if problem.corrections != Corrections() or problem.profile.ranks_per_core != 1:
        return  # T of the profile alone is bounded
    if not any(planning.is_held(planning.longest(s)) for s in problem.strategies):
        return
    schemes = dict.fromkeys(s for strategy in problem.strategies for s in strategy.schemes)
    schemes |= dict.fromkeys(scheme.staying for scheme in schemes)
    scenario = SimpleNamespace(
        profile=problem.profile,
        num_devices=problem.num_devices,
        max_len_tokens=planning.max_len_tokens,
    )
    bound_ms = perfect_balance_ms(scenario, planning.batch, list(schemes))  # type: ignore[arg-type]
    plan, _ = plan_with_time(planning, problem.strategies)
    if bound_ms > plan.makespan_ms * (1 + _ROUNDING):
        yield f"perfect balance takes {bound_ms} ms, {plan.strategy} {plan.makespan_ms}"


def illegal_plans(problem: Problem) -> Iterator[str]:
    """Yield a sentence for each promise that the plan over all strategies breaks."""
    held = problem.settings.max_len_override
    planning = problem.planning()
    if not any(planning.is_held(planning.longest(s)) for s in problem.strategies):
        return
    plan, time_ms = plan_with_time(planning, problem.strategies)
    placed = [i for p in plan.pipelines for micro_batch in p.micro_batches for i in micro_batch]
    if sorted(placed) != list(range(len(problem.lengths))):
        yield "not every sequence is placed once"
    for pipeline in plan.pipelines:
        for micro_batch in pipeline.micro_batches:
            if sum(plan.micro_batch_lengths(micro_batch)) > held[pipeline.scheme]:
                yield f"a micro-batch of {pipeline.scheme} is above its MaxLen"
    if not groups_of(plan.strategy) <= groups_of_all(problem.strategies):
        yield f"{plan.strategy} needs groups that no candidate has"
    if IterationPlan.from_json(plan.to_json()) != plan:
        yield "a plan is another one as a document"
    again, _ = plan_with_time(problem.planning(), problem.strategies)
    if again.digest != plan.digest:
        yield "equal problems have plans of different digests"
    backwards = replace(problem, lengths=problem.lengths[::-1])
    if not isclose(backwards.time_ms(problem.strategies), time_ms, rel_tol=_ROUNDING):
        yield "the order of the global batch changes the time"


def slower_with_more(problem: Problem, rng: Random, num_subsets: int = 4) -> Iterator[str]:
    """Yield a sentence for each of some subsets of the strategies whose plan is faster than that of
    all by more than `TOLERANCE`.
    """
    all_ms = problem.time_ms(problem.strategies)
    for _ in range(num_subsets):
        few = rng.sample(problem.strategies, rng.randint(1, len(problem.strategies)))
        few_ms = problem.time_ms(few)
        if all_ms > few_ms * (1 + TOLERANCE):
            names = ", ".join(map(str, few))
            yield f"{names} take {few_ms} ms, with others beside them {all_ms} ms"
