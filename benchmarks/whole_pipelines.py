"""How much a better planner could gain at most: pipelines are whole, sequences may be divided.

    python -m benchmarks.whole_pipelines --cases 32b

The bound of perfect balance lets a fraction of a pipeline stand on what devices are left. Here an
integer program chooses how many pipelines of each scheme there are, and sequences are divided
freely between them: no strategy without phases, no dispatch and no packing can be faster, in the
space of <TP,PP> alone and in the full one, where strategies that gather keep the bound of perfect
balance, because phases cut the ranks anew. One line for each case: the mean of some global batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from benchmarks.pages import put_section
from ds_hydra.lab.simulator.cases import list_cases, load_case
from ds_hydra.lab.simulator.compare import compare
from ds_hydra.lab.simulator.results import Planned
from ds_hydra.lab.simulator.scenario import Scenario, perfect_balance_ms
from ds_hydra.lab.simulator.systems import DS_HYDRA, PLAIN, Settings
from ds_hydra.sampler.planner.problem import SolverLimits, make_model
from ds_hydra.sampler.warm_up import warm_up
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.schemes.scheme import Scheme

TITLE = "What a better planner could gain"
_STEP = 1.15
"""Lengths whose ratio is below are one class, as short as its shortest."""
_PRECISION = 2e-3

IntArray = npt.NDArray[np.int64]


class WholePipelines:
    """The integer program of one global batch. `lengths` in tokens, `schemes` do not gather."""

    def __init__(self, scenario: Scenario, lengths: Sequence[int], schemes: Sequence[Scheme]):
        self._num_devices = scenario.num_devices
        self._devices = [scheme.num_devices for scheme in schemes]
        shortest, self._tokens = classes_of(lengths)
        terms = [scenario.profile.get_latency(scheme) for scheme in schemes]
        held = np.array([scenario.max_len_tokens(scheme) for scheme in schemes])
        alone = [[t.micro_batch_ms([length]) for length in shortest] for t in terms]
        pp = np.array([scheme.pp for scheme in schemes])
        # [scheme, class]
        self._alone_ms = np.array(alone) * pp[:, None]
        self._fits = shortest <= held[:, None]
        per_token = np.array([t.sequences_ms(shortest) / shortest for t in terms])
        constants = np.array([t.constant_ms for t in terms]) / held
        self._per_token_ms = per_token + constants[:, None]
        self._traffic_ms = np.array([t.traffic_ms for t in terms]) / held

    def least_devices(self, limit_ms: float) -> float:
        """Devices of the pipelines that end within `limit_ms`; inf where none can hold a class."""
        model = make_model(SolverLimits())
        allowed = self._fits & (self._alone_ms <= limit_ms)
        if not allowed.any(axis=0).all():
            return np.inf
        counts = [model.add_var(var_type="I", lb=0) for _ in self._devices]
        loads = [[] for _ in counts]
        traffic = [[] for _ in counts]
        for number, tokens in enumerate(self._tokens.tolist()):
            parts = []
            for scheme in np.flatnonzero(allowed[:, number]):
                part = model.add_var(lb=0)
                parts.append(part)
                loads[scheme].append(float(tokens * self._per_token_ms[scheme, number]) * part)
                traffic[scheme].append(float(tokens * self._traffic_ms[scheme]) * part)
            model += sum(parts[1:], parts[0]) == 1
        for count, *sums in zip(counts, loads, traffic):
            for terms in sums:
                if terms:
                    model += sum(terms[1:], terms[0]) <= limit_ms * count
        model.objective = sum(n * count for n, count in zip(self._devices, counts))
        model.optimize(max_seconds=10)
        # What is proven counts, also where the solver stopped before
        return float(model.objective_bound)

    def bound_ms(self, low_ms: float, high_ms: float) -> float:
        """The least time with the devices that there are, between `low_ms` and `high_ms`."""
        while high_ms - low_ms > _PRECISION * high_ms:
            middle = (low_ms + high_ms) / 2
            if self.least_devices(middle) > self._num_devices + 1e-6:
                low_ms = middle
            else:
                high_ms = middle
        return low_ms


def classes_of(lengths: Iterable[int]) -> tuple[IntArray, IntArray]:
    """The shortest length of each class of near ones, and the tokens of the class.

    >>> [values.tolist() for values in classes_of([100, 105, 300, 301, 1000])]
    [[100, 300, 1000], [205, 601, 1000]]
    """
    shortest: list[int] = []
    tokens: list[int] = []
    for length in sorted(lengths):
        if not shortest or length > _STEP * shortest[-1]:
            shortest.append(length)
            tokens.append(0)
        tokens[-1] += length
    return np.array(shortest), np.array(tokens)


def above_bound(planned: Planned, scenario: Scenario) -> tuple[float, float]:
    """Propagation of ds_hydra above perfect balance, and above whole pipelines: means of the
    global batches of `scenario`, whose profile is that of `planned`.
    """
    schemes = [
        s
        for s in planned.profile.latency
        if s.num_devices <= scenario.num_devices and scenario.max_len_tokens(s) > 0
    ]
    families = [[s for s in schemes if s.gather], [s for s in schemes if not s.gather]]
    perfect, whole = [], []
    for batch, taken in zip(scenario.batches, planned.result.propagation_ms.tolist()):
        gathered, other = (
            perfect_balance_ms(scenario, batch, own) if own else np.inf for own in families
        )
        perfect.append(taken / min(gathered, other))
        if other < min(gathered, taken) and families[1]:
            program = WholePipelines(scenario, batch.lengths, families[1])
            other = program.bound_ms(other, min(gathered, taken))
        whole.append(taken / min(gathered, other))
    return float(np.mean(perfect)) - 1, float(np.mean(whole)) - 1


def row_of(name: str, num_batches: int) -> tuple[str, list[float]]:
    """A line of the table, and its shares for the means; NaN where <TP,PP> cannot run."""
    workload = load_case(name).workload
    workload = workload.linked_by(find_cluster(workload.profile, workload.num_devices))
    settings = Settings(iterations=num_batches, systems=[PLAIN])
    found = compare(workload, settings)
    shares: list[float] = []
    for system in (PLAIN, DS_HYDRA):
        if system not in found.planned:
            shares += [np.nan, np.nan]
            continue
        planned = found.planned[system]
        scenario = settings.scenario(workload).knowing(planned.profile)
        shares += above_bound(planned, scenario)
    cells = ["cannot run" if np.isnan(share) else f"{share:.1%}" for share in shares]
    return f"| {name} | {' | '.join(cells)} |", shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default="", help="only cases whose name has this text in it")
    parser.add_argument(
        "--batches", type=int, default=4, help="global batches (default %(default)s)"
    )
    parser.add_argument("--page", type=Path, help=f"page whose section {TITLE!r} is replaced")
    args = parser.parse_args()
    warm_up()
    names = [n for n in list_cases() if load_case(n).figure == "Fig. 10" and args.cases in n]
    rows = [row_of(name, args.batches) for name in tqdm(names)]
    means = np.nanmean([shares for _, shares in rows], axis=0)
    text = "\n".join(
        [
            f"Propagation of ds_hydra above two bounds, means of {args.batches} global batches (`python -m "
            "benchmarks.whole_pipelines`). *Perfect balance*: sequences divided freely, fractions of pipelines. "
            "*Whole pipelines*: an integer program says how many there are of each scheme; where strategies "
            "gather, phases cut the ranks anew, and perfect balance is what bounds them. Neither knows bubbles, "
            "or that sequences are whole.",
            "",
            "| case | `<TP,PP>` alone: above perfect balance | above whole pipelines | full space: above perfect "
            "balance | above whole pipelines |",
            "|---|---|---|---|---|",
            *(row for row, _ in rows),
            f"| mean | {' | '.join(f'{share:.1%}' for share in means)} |",
        ]
    )
    print(text)
    if args.page is not None:
        put_section(args.page, TITLE, text)


if __name__ == "__main__":
    main()
