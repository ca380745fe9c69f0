"""Readers of what comes from disk or from another rank, under damaged input: our errors, quickly,
or nothing.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import ds_config, small_profile
from hypothesis import strategies as st
from reference import make_batch, make_profile
from run_folders import write_run_folder

from ds_hydra.configs.ds_config import read_ds_config
from ds_hydra.engine.checkpointing.files import MANIFEST_SCHEMA, verify
from ds_hydra.errors import HydraError
from ds_hydra.report.documents import describe_runs
from ds_hydra.report.run_folder import load_run
from ds_hydra.report.timelines import trace_run
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.schemes.enumeration import strategies_from_json
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

SLOWEST_S = 10.0
"""CPU time, s, of a reader that hangs: the slowest takes 0.2, more on a machine that is shared."""


WITH_OPTIONS = ("<1,2;ckpt=3;stages=3,1>", "<cp2,1;ckpt=1>")


def _plan(large: str = "<2,1>", small: str = "<1,1>") -> IterationPlan:
    profile = make_profile({small: (0.01, 1.0, 3.0), large: (0.006, 0.6, 4.0)})
    strategies = [Strategy.parse(f"{large} + 2x{small}")]
    return plan_iteration(
        make_batch([5, 9, 30, 7, 12], 3),
        strategies=strategies,
        profile=profile,
        num_devices=6,
        settings=PlannerSettings(
            max_len_override={Scheme.parse(text): 100 for text in (large, small)}
        ),
    )


def _profile_with_options() -> dict[str, Any]:
    profile = small_profile(6_000_000, num_layers=4)
    memory = {
        "slice_bytes_per_layer_per_hidden2": 0.1,
        "input_bytes_per_token_per_layer_per_hidden": 4,
    }
    entry = {"tp": 1, "pp": 2, "quadratic_ms": 1e-4, "linear_ms": 0.1, "constant_ms": 1.0}
    options = {"ckpt": 3, "stages": [3, 1], **entry}
    return {**profile, "memory": {**profile["memory"], **memory}, "schemes": [entry, options]}


def read_profile(document: Any) -> None:
    """Use a profile as the engine does: read it, then ask for times and for memory."""
    profile = Profile.from_json(document)
    for scheme, latency in profile.latency.items():
        latency.micro_batch_ms([3, 5])
        profile.max_len_tokens(scheme, 4)


def read_histogram(document: Any) -> None:
    histogram = LengthHistogram.from_json(document)
    assert histogram.num_tokens >= histogram.num_sequences > 0
    histogram.quantile(0.5)


def read_plan(document: Any) -> None:
    plan = IterationPlan.from_json(document)
    assert IterationPlan.from_json(plan.to_json()).digest == plan.digest


def read_strategy(text: Any) -> None:
    if isinstance(text, str):
        strategy = Strategy.parse(text)
        assert Strategy.parse(str(strategy)) == strategy
        strategy.place()


HYDRA = {"context_length": 4096, "tokens_per_iteration": 65536, "planner": {"num_workers": 2}}


def targets(folder: Path) -> dict[str, tuple[Callable[[Any], None], Any]]:
    """Name -> (reader, a valid input as a JSON value)."""
    manifest = folder / "ds_hydra_manifest.json"

    def read_manifest(document: Any) -> None:
        manifest.write_text(json.dumps(document))
        verify(folder)

    return {
        "configuration": (
            lambda document: (
                read_ds_config(document) and None if isinstance(document, dict) else None
            ),
            ds_config(hydra=HYDRA),
        ),
        "profile": (read_profile, small_profile(6_000_000)),
        "profile with options": (read_profile, _profile_with_options()),
        "histogram": (
            read_histogram,
            {"schema": "ds_hydra.lengths/1", "name": "a", "counts": {"3": 4, "17": 1, "4096": 2}},
        ),
        "strategies": (
            lambda document: strategies_from_json(document) and None,
            {"schema": "ds_hydra.strategies/1", "strategies": ["4x<1,1>", "1x<2,1> + 2x<1,1>"]},
        ),
        "strategy": (read_strategy, "1x<2,1> + 2x<1,1>"),
        "strategy with options": (
            read_strategy,
            "1x<2,2;ckpt=3;stages=3,1> + 2x<sp2,4,1;ckpt=1> + <sp4,cp2,1;ckpt=2>",
        ),
        "plan": (read_plan, _plan().to_json()),
        "plan with options": (read_plan, _plan(*WITH_OPTIONS).to_json()),
        "manifest": (
            read_manifest,
            {"schema": MANIFEST_SCHEMA, "files": {"a.pt": {"bytes": 3, "sha256": "0"}}},
        ),
    }


def check(reader: Callable[[Any], None], value: Any) -> str:
    """ "accepted" or "refused"; raises AssertionError for any other outcome."""
    start = time.process_time()
    try:
        # `read_json_object` refuses everything else before the other readers are called
        if isinstance(value, dict) or reader is read_strategy:
            reader(value)
        outcome = "accepted"
    except HydraError as error:
        outcome = "refused" if len(str(error)) < 100_000 else "refused at length"
    except Exception as error:
        raise AssertionError(
            f"{type(error).__name__}: {error} for {json.dumps(value)[:2000]}"
        ) from error
    assert time.process_time() - start < SLOWEST_S, f"slow: {json.dumps(value)[:2000]}"
    return outcome


ODD_VALUES = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63), 10**30, 1e308, -1e308, 0.5, float("inf"), float("nan"),
    "", "a", "0", "-1", "9" * 30, "999999999x<1,1>", "1x<999999,999999>", "\0", "é", "x" * 5000, [], {}, [[]], [0],
    ["a"], {"a": 1}, {"": None}, "auto",
)  # fmt: skip


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(ODD_VALUES),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
)


def inputs_like(valid: Any) -> st.SearchStrategy[Any]:
    """`valid` with places changed by `mutate`, or with any value in a first-level place."""
    mutated = st.builds(mutate, st.just(valid), st.randoms(use_true_random=False))
    if isinstance(valid, dict):
        key = st.sampled_from(sorted(valid))
        return mutated | st.builds(lambda key, value: {**valid, key: value}, key, VALUES)
    return mutated | st.text()


def mutate(value: Any, generator: random.Random) -> Any:
    """`value` with one to three places changed: replaced, removed, doubled, renamed or swapped."""
    value = copy.deepcopy(value)
    for _ in range(generator.randint(1, 3)):
        value = _mutate_once(value, generator)
    return value


def _mutate_once(value: Any, generator: random.Random) -> Any:
    if isinstance(value, dict) and value and generator.random() < 0.9:
        key = generator.choice(list(value))
        kind = generator.random()
        if kind < 0.08:
            del value[key]
        elif kind < 0.16:
            value[_mutate_text(key, generator)] = value[key]
        else:
            value[key] = _mutate_once(value[key], generator)
        return value
    if isinstance(value, list) and value and generator.random() < 0.9:
        index = generator.randrange(len(value))
        kind = generator.random()
        if kind < 0.1:
            del value[index]
        elif kind < 0.2:
            value.insert(index, copy.deepcopy(generator.choice(value)))
        else:
            value[index] = _mutate_once(value[index], generator)
        return value
    if isinstance(value, str) and generator.random() < 0.6:
        return _mutate_text(value, generator)
    if type(value) in (int, float) and generator.random() < 0.5:
        return (
            value + generator.choice([-1, 1, 7, -(2**40), 2**40]) if abs(value) < 1e300 else -value
        )
    return copy.deepcopy(generator.choice(ODD_VALUES))


def _mutate_text(text: str, generator: random.Random) -> str:
    place = generator.randint(0, len(text))
    return (
        text[:place]
        + generator.choice(["", "0", "9", "x", "<", ">", ",", "+", "-", " ", "é", "\0", "٣"])
        + text[place + generator.randint(0, 2) :]
    )


def damaged_copy(intact: Path, folder: Path, generator: random.Random) -> str:
    """A copy of the run folder `intact` with one or two files damaged; says which and how."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(intact, folder)
    done = []
    for _ in range(generator.randint(1, 2)):
        files = sorted(p for p in folder.rglob("*") if p.is_file() and "json" in p.suffix)
        at_top = [p for p in files if p.parent == folder]
        path = generator.choice(at_top if at_top and generator.random() < 0.8 else files)
        damage = generator.choice(DAMAGES)
        damage(path, generator)
        done.append(f"{damage.__name__} {path.relative_to(folder)}")
    return ", ".join(done)


def change_values(path: Path, generator: random.Random) -> None:
    """One document of the file mutated; a line where there are several."""
    lines = path.read_bytes().splitlines(keepends=True)
    if path.suffix == ".json":
        lines = [b"".join(lines)]
    if lines:
        index = generator.randrange(len(lines))
        try:
            value = mutate(json.loads(lines[index]), generator)
        except (ValueError, RecursionError):
            return  # damaged already
        lines[index] = json.dumps(value).encode() + b"\n"
    path.write_bytes(b"".join(lines))


def change_bytes(path: Path, generator: random.Random) -> None:
    """Up to three bytes replaced, inserted or removed."""
    content = bytearray(path.read_bytes())
    for _ in range(generator.randint(1, 3)):
        place = generator.randint(0, len(content))
        count = generator.choice((0, 1, 1, 40))
        content[place : place + count] = bytes(
            generator.choice((0, 10, 34, 44, 57, 93, 125, 128, 255))
            for _ in range(generator.randint(0, 2))
        )
    path.write_bytes(content)


def cut(path: Path, generator: random.Random) -> None:
    """The end is missing, and what a resumed run writes follows."""
    content = path.read_bytes()
    kept = content[: generator.randint(0, len(content))]
    path.write_bytes(kept + content * generator.randint(0, 1))


def replace_file(path: Path, generator: random.Random) -> None:
    """Something else in its place."""
    path.unlink()
    content = generator.choice(
        (None, b"", b"[" * 100_000, b'{"a":' * 100_000, b"null\n", b"9" * 5000)
    )
    path.mkdir() if content is None else path.write_bytes(content)


DAMAGES = (change_values, change_values, change_values, change_bytes, cut, replace_file)


def read_run_folder(folder: Path) -> str:
    """All that `ds-hydra report --perfetto --json` does with it: "accepted" or "refused"."""
    try:
        run = load_run(folder)
        json.dumps(describe_runs([run]))
        if run.traces.keys() & {record.iteration for record in run.records}:
            json.dumps(trace_run(run))
    except HydraError:
        return "refused"
    return "accepted"


def fuzz_run_folders(folder: Path, num_folders: int, seed: int = 1) -> dict[str, float]:
    """Damaged run folders, read; raises AssertionError naming the damage where one is not read or
    refused in time.
    """
    intact = write_run_folder(folder / f"intact {seed}", num_iterations=6)
    outcomes = {"accepted": 0, "refused": 0}
    slowest = 0.0
    for number in range(num_folders):
        generator = random.Random(f"{seed}-{number}")
        damage = damaged_copy(intact, folder / "damaged", generator)
        begin = time.process_time()
        try:
            outcomes[read_run_folder(folder / "damaged")] += 1
        except Exception as error:
            raise AssertionError(f"folder {seed}-{number}, {damage}: {error!r}") from error
        seconds = time.process_time() - begin
        assert seconds < SLOWEST_S, f"folder {seed}-{number}, {damage}: {seconds:.1f} s"
        slowest = max(slowest, seconds)
    return {"inputs": num_folders, **outcomes, "slowest_ms": 1e3 * slowest}
