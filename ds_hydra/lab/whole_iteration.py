"""Time of a whole iteration under DP, ZeRO, TP, PP and offload: the model of Rubick, App. A.

Seven parameters are fitted to measured iterations; everything else is known before: sizes of the
model, degrees of the plan, bandwidths, and the time of one forward pass. Times are ms, volumes MiB,
and bandwidths GB/s taken as MiB per ms, as the originals do.

    T_iter = T_fwd + T_cc + T_comm.tp + T_comm.pp + T_oo + k_const
    T_cc   = f_sync(T_bwd, T_comm.dp),   T_bwd = k_bwd * T_fwd
    T_oo   = k_opt * P / x,   x = tp * pp, or dp where the optimizer is sharded

Where the originals' code differs from their text this follows the code, which is what their errors
belong to: gradients cross the network once for each accumulation step, recomputation lengthens the
forward pass, and with offload T_cc = f_off(f_sync(T_bwd, T_comm.dp), T_off) and T_oo =
f_swap(T_opt, T_off), in which f_off and f_swap add their constant to both times: x + k + y. f_swap
is part of every plan without TP and PP. `norm_overlap` is f of the text, (x^k + y^k)^(1/k): nothing
overlaps for k = 1, everything for large k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_hydra.configs.files import MAX_DEVICES, check_count, check_number
from ds_hydra.errors import HydraConfigError

_WHOLE_ITERATION_SCHEMA = "ds_hydra.whole_iteration/1"

_LARGEST_OVERLAP = 100.0
"""k_sync beyond which f_sync is the larger of both times to within 1%; without a bound it could run
off.
"""
_DAMPING = (1e-9, 1e9)

_TOTAL_WEIGHT = 2.0
"""Weight of the log error of T_iter against those of its parts."""
_PRIOR_WEIGHT = 0.06
"""Log error that a parameter off its prior by a factor e costs. Seven parameters and four measured
iterations leave some open; without a prior they fit noise and predict other plans badly."""
_PRIOR_SYNC, _PRIOR_SHARE = 10.0, 0.003
"""Prior: communication hides behind the backward pass, and constants are 0.3% of an iteration
each.
"""
_PRIOR_OFFLOAD = 3.0
"""Prior: Adam reads and writes 28 bytes a parameter (weight, both moments, gradient), of which one
thread of a host moves some 10 GB/s: 2.9 ms per Mi parameters.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationModel:
    """The seven fitted parameters (Table 5). `opt` and `opt_offload` are ms per Mi parameters."""

    bwd: float
    sync: float
    opt: float
    opt_offload: float
    const_ms: float
    off_ms: float
    swap_ms: float


_LOWER = IterationModel(
    bwd=1.0, sync=1.0, opt=1e-8, opt_offload=1e-8, const_ms=1e-8, off_ms=0.0, swap_ms=0.0
)
_UPPER = IterationModel(
    bwd=10.0, sync=_LARGEST_OVERLAP, opt=1e3, opt_offload=1e3, const_ms=1e6, off_ms=1e6, swap_ms=1e6
)
"""Bounds of the fit: the originals', and upper ones where they have none."""


_DIVISORS = ("threads_per_gpu", "bandwidth_dp", "bandwidth_tp", "bandwidth_pp", "bandwidth_host")
_LEAST = 1e-9
"""Least divisor and least measured time: far below any rate, share of a host, or iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSetup:
    """One plan of one model on one cluster. `bandwidth_*` in GB/s, `params_mi` in units of 2^20
    parameters.

    `forward_ms` is the forward pass of one accumulation step. `forward_passes` is 2 with
    recomputation (any number that describes it), and is multiplied with `accumulation_steps`.
    `hidden_elements` is sequence length times hidden size, and `batch` the sequences of the whole
    iteration.
    """

    forward_ms: float
    params_mi: float
    dp: int
    tp: int = 1
    pp: int = 1
    is_sharded: bool = False
    is_offloaded: bool = False
    threads_per_gpu: float = 1.0
    accumulation_steps: int = 1
    forward_passes: float = 1.0
    batch: int = 1
    hidden_elements: int = 0
    num_layers: int = 0
    bandwidth_dp: float = 1.0
    bandwidth_tp: float = 1.0
    bandwidth_pp: float = 1.0
    bandwidth_host: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name in ("is_sharded", "is_offloaded"):
                if type(value) is not bool:
                    raise HydraConfigError(f"{name} is {value!r:.80}, expected true or false")
            elif name in ("dp", "tp", "pp"):
                check_count(value, name, least=1, most=MAX_DEVICES)
            else:
                check_number(value, name, least=_LEAST if name in _DIVISORS else 0)
        if self.forward_ms == 0:
            raise HydraConfigError("forward_ms is 0, expected the time of a forward pass")

    @property
    def is_3d(self) -> bool:
        """Whether TP or PP divide the model."""
        return self.tp > 1 or self.pp > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTime:
    """Predicted parts of one iteration in ms; they add up to `total_ms`."""

    forward_ms: float
    backward_and_sync_ms: float
    tensor_parallel_ms: float
    pipeline_ms: float
    optimizer_ms: float
    constant_ms: float

    @property
    def total_ms(self) -> float:
        """T_iter."""
        return float(sum(asdict(self).values()))


def norm_overlap(first: float, second: float, k: float) -> float:
    """f_k(x, y) = (x^k + y^k)^(1/k) (App. A.3): x + y for k = 1, max(x, y) for k towards
    infinity.
    """
    larger, smaller = max(first, second), min(first, second)
    return larger * (1.0 + (smaller / larger) ** k) ** (1.0 / k) if larger > 0 else 0.0


def predict_iteration(model: IterationModel, setup: IterationSetup) -> IterationTime:
    """T_iter in its parts."""
    steps = setup.accumulation_steps
    forward = setup.forward_ms * setup.forward_passes * steps
    backward = model.bwd * setup.forward_ms * steps
    sync = _sync_mib(setup) / setup.bandwidth_dp
    work = norm_overlap(backward, sync, model.sync)
    offload = 4 * setup.params_mi / setup.dp / setup.bandwidth_host if setup.is_offloaded else 0.0
    return IterationTime(
        forward_ms=forward,
        backward_and_sync_ms=work + model.off_ms + offload if setup.is_offloaded else work,
        tensor_parallel_ms=_tensor_parallel_mib(setup) / setup.bandwidth_tp,
        pipeline_ms=_pipeline_mib(setup) / setup.bandwidth_pp,
        optimizer_ms=_optimizer_ms(model, setup)
        + (0.0 if setup.is_3d else model.swap_ms + offload),
        constant_ms=model.const_ms,
    )


def _sync_mib(setup: IterationSetup) -> float:
    """V_dp: 2 (d-1)/d of the fp32 gradients, per accumulation step."""
    share = setup.params_mi / (setup.tp * setup.pp)
    return 8 * share * (setup.dp - 1) / setup.dp * setup.accumulation_steps


def _tensor_parallel_mib(setup: IterationSetup) -> float:
    """V_tp: 4 all-reduces of 2 (t-1)/t fp32 activations per layer; stages run one after the
    other.
    """
    elements = setup.hidden_elements * setup.num_layers * setup.batch / setup.dp
    return 32 * elements * (setup.tp - 1) / setup.tp / 2**20


def _pipeline_mib(setup: IterationSetup) -> float:
    """V_pp: activations and their gradients between stages."""
    if setup.pp == 1:
        return 0.0
    return 16 * setup.pp * setup.batch / setup.dp * setup.hidden_elements / setup.tp / 2**20


def _optimizer_ms(model: IterationModel, setup: IterationSetup) -> float:
    if setup.is_offloaded:
        return model.opt_offload * setup.params_mi / (setup.dp * setup.threads_per_gpu)
    divided_by = setup.dp if setup.is_sharded else setup.tp * setup.pp
    return model.opt * setup.params_mi / divided_by


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredIteration:
    """A setup, its measured time, and the parts of it that were measured too."""

    setup: IterationSetup
    iteration_ms: float
    backward_and_sync_ms: float | None = None
    optimizer_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("iteration_ms", "backward_and_sync_ms", "optimizer_ms"):
            value = getattr(self, name)
            if name == "iteration_ms" or value is not None:
                check_number(value, name, least=_LEAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationFit:
    """Fitted parameters, RMSLE of T_iter, and measured / predicted - 1 of T_iter at every
    point.
    """

    model: IterationModel
    rmsle: float
    relative_errors: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """The `ds_hydra.whole_iteration/1` document."""
        return {
            "schema": _WHOLE_ITERATION_SCHEMA,
            "parameters": asdict(self.model),
            "rmsle": self.rmsle,
            "relative_errors": list(self.relative_errors),
        }


def fit_iterations(points: Sequence[MeasuredIteration]) -> IterationFit:
    """The parameters that minimise the squared log errors (RMSLE) of T_iter and of its measured
    parts.

    A weak prior holds what the points leave open. Damped Gauss-Newton from several starts, in
    coordinates that keep the bounds. Raises HydraConfigError without points.
    """
    if not points:
        raise HydraConfigError("there is no measured iteration to fit; measure three or more")
    prior = _prior(points)
    candidates = [_descend(points, prior, start) for start in _starts(prior)]
    coordinates = min(candidates, key=lambda c: float(np.sum(_residuals(points, prior, c) ** 2)))
    model = _to_model(coordinates)
    predicted = np.array([predict_iteration(model, p.setup).total_ms for p in points])
    measured = np.array([p.iteration_ms for p in points])
    return IterationFit(
        model=model,
        rmsle=float(np.sqrt(np.mean(np.log(predicted / measured) ** 2))),
        relative_errors=tuple((measured / predicted - 1).tolist()),
    )


FloatArray = npt.NDArray[np.float64]


def _as_array(model: IterationModel) -> FloatArray:
    return np.array([getattr(model, field.name) for field in fields(model)])


def _to_model(coordinates: FloatArray) -> IterationModel:
    """Coordinates are logs of the distance from the lower bound, so that every value is legal."""
    values = np.minimum(_as_array(_LOWER) + np.exp(coordinates), _as_array(_UPPER))
    return IterationModel(**{f.name: float(v) for f, v in zip(fields(IterationModel), values)})


def _prior(points: Sequence[MeasuredIteration]) -> FloatArray:
    constant = _PRIOR_SHARE * float(np.median([p.iteration_ms for p in points]))
    distance = [1.0, _PRIOR_SYNC, 0.01, _PRIOR_OFFLOAD, constant, constant, constant]
    logs: FloatArray = np.log(np.array(distance))
    return logs


def _starts(prior: FloatArray) -> Iterator[FloatArray]:
    """The prior with little, some and much overlap."""
    for sync in (0.1, 1.0, 10.0):
        start = prior.copy()
        start[1] = np.log(sync)
        yield start


def _residuals(
    points: Sequence[MeasuredIteration], prior: FloatArray, coordinates: FloatArray
) -> FloatArray:
    model = _to_model(coordinates)
    ratios: list[float] = []
    weights: list[float] = []
    for point in points:
        time = predict_iteration(model, point.setup)
        ratios.append(time.total_ms / point.iteration_ms)
        weights.append(_TOTAL_WEIGHT)
        if point.backward_and_sync_ms is not None:
            ratios.append(time.backward_and_sync_ms / point.backward_and_sync_ms)
            weights.append(1.0)
        if point.optimizer_ms is not None:
            ratios.append(time.optimizer_ms / point.optimizer_ms)
            weights.append(1.0)
    errors: FloatArray = np.log(np.maximum(ratios, 1e-12)) * weights
    return np.concatenate([errors, _PRIOR_WEIGHT * (coordinates - prior)])


def _descend(
    points: Sequence[MeasuredIteration], prior: FloatArray, start: FloatArray, num_steps: int = 100
) -> FloatArray:
    """Levenberg-Marquardt with a numeric Jacobian."""
    best, residuals = start, _residuals(points, prior, start)
    damping = 1e-2
    for _ in range(num_steps):
        jacobian = _jacobian(points, prior, best, residuals)
        gradient, hessian = jacobian.T @ residuals, jacobian.T @ jacobian
        step = np.linalg.solve(hessian + damping * np.eye(best.size), -gradient)
        tried = np.clip(best + np.clip(step, -2, 2), -20, 15)
        found = _residuals(points, prior, tried)
        if found @ found < residuals @ residuals:
            gain = residuals @ residuals - found @ found
            best, residuals, damping = tried, found, max(damping / 3, _DAMPING[0])
            if gain < 1e-10:
                break
        else:
            damping *= 4
            if damping > _DAMPING[1]:
                break
    return best


def _jacobian(
    points: Sequence[MeasuredIteration], prior: FloatArray, at: FloatArray, residuals: FloatArray
) -> FloatArray:
    width = 1e-6
    units = width * np.eye(at.size)
    columns = [(_residuals(points, prior, at + unit) - residuals) / width for unit in units]
    return np.stack(columns, axis=1)


def measured_from_json(
    document: Mapping[str, Any], *, source: str = "points"
) -> list[MeasuredIteration]:
    """Points of a document {"points": [{"iteration_ms": ..., "setup": {...}}, ...]}."""
    try:
        return [
            MeasuredIteration(**{**point, "setup": IterationSetup(**point["setup"])})
            for point in document["points"]
        ]
    except HydraConfigError as error:
        raise HydraConfigError(f"{source}: {error}; mend or remove the measurement") from error
    except (KeyError, TypeError) as error:
        raise HydraConfigError(
            f'{source}: expected {{"points": [{{"setup": {{...}}, "iteration_ms": ...}}, ...]}}: {error!r}'
        ) from error
