"""`ds-hydra profile`: on ranks, on one device for a cluster, and with bad input."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from command_line import invoke
from distributed import run_distributed
from engines import small_profile
from transformers import LlamaConfig

from ds_hydra.configs import find_file
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.profiling import profile_document, profile_run, profiler, rehearsal
from ds_hydra.engine.profiling.profile_run import ProfileRequest, run_profile
from ds_hydra.engine.propagation import Propagator
from ds_hydra.engine.ranks import memory
from ds_hydra.engine.ranks.hosts import Hosts, find_ranks_per_core
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Profile, Scheme, Strategy

CPU = torch.device("cpu")


def save_model(folder, **changes):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 251}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaConfig(**sizes | heads | changes).save_pretrained(folder)
    return str(folder)


def request_for(model, *, context=64, repeats=2, tp=None, pp=None, **hydra):
    config = HydraConfig.parse(
        {
            "context_length": context,
            "tokens_per_iteration": context,
            "profiling": {"lengths": [8, 32, 64], "repeats": repeats},
            **hydra,
        }
    )
    return ProfileRequest(model=model, config=config, tp=tp, pp=pp)


def count_cases():
    """Cases that are measured from now on, and tokens whose memory is."""
    seen = []

    def noting(name):
        measure = getattr(profiler, name)

        def noted(*arguments, **options):
            seen.append(name)
            return measure(*arguments, **options)

        setattr(profiler, name, noted)

    noting("token_bytes")
    noting("measure_stage_ms")
    return seen


def count_rehearsals():
    """Strategies of the iterations that are run from now on."""
    seen, original = [], rehearsal.run_once

    def counted(propagator, plan):
        seen.append(str(plan.strategy))
        return original(propagator, plan)

    rehearsal.run_once = counted
    return seen


def on_ranks(model):
    """Everything that needs ranks, in one start of them."""
    rehearsed, measured = count_rehearsals(), count_cases()
    document = run_profile(request_for(model), CPU)
    return {"measured": measured, "rehearsed": rehearsed, "document": document}


def measured_on_unequal_hosts(model):
    """Two hosts, the second with less memory, under a launcher that tells no LOCAL_WORLD_SIZE."""
    rank = dist.get_rank()
    os.environ.pop("LOCAL_SIZE")
    total = SimpleNamespace(total=(4_000_000, 3_000_000)[rank])
    request = request_for(model, context=2048)
    stage_model, schemes = profile_run._prepare(request, torch.float32, CPU, 2)
    homogeneous = {scheme: Strategy.alike(scheme, 2) for scheme in schemes}
    with (
        mock.patch.object(socket, "gethostname", return_value=f"host{rank}"),
        mock.patch.object(profile_document.psutil, "virtual_memory", return_value=total),
        contextlib.closing(Propagator(stage_model, device=CPU, max_groups=9)) as propagator,
    ):
        document = profiler._measure_memory(propagator, homogeneous, request.config)
        lengths = profiler._lengths_that_fit(propagator, schemes, document, request.config)
    return document, {str(scheme): of for scheme, of in lengths.items()}


@pytest.mark.distributed
def test_ranks_with_other_memory_measure_the_same_lengths(tmp_path):
    first, second = run_distributed(measured_on_unequal_hosts, 2, save_model(tmp_path))
    assert first == second
    hardware = first[0]["hardware"]
    assert (hardware["memory_bytes"], hardware["devices_per_node"]) == (3_000_000, 1)


@pytest.mark.slow
@pytest.mark.distributed
def test_schemes_of_four_ranks_are_measured_once(tmp_path):
    results = run_distributed(on_ranks, 4, save_model(tmp_path / "model"))
    assert len({json.dumps(r["document"], sort_keys=True) for r in results}) == 1
    first = results[0]
    document = first["document"]
    profile = Profile.from_json(document)
    assert set(profile.latency) == {
        Scheme(t, p) for t, p in [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    }
    assert all(len(entry["measured"]["times_ms"]) == 3 for entry in document["schemes"])
    packed = [
        micro_batch for entry in document["schemes"] for micro_batch in entry["measured"]["packed"]
    ]
    assert [(micro_batch["length"], micro_batch["num_sequences"]) for micro_batch in packed] == [
        (8, 8)
    ] * 6
    assert all(micro_batch["time_ms"] > 0 for micro_batch in packed)
    assert document["model"]["hidden_size"] == 32
    # Memory of three TP degrees
    assert first["measured"].count("token_bytes") == 3
    # Each of these, six schemes with three lengths and a packed micro-batch in two runs, and what
    # is warmed up: the longest of all, and the shortest of each scheme
    assert first["measured"].count("measure_stage_ms") == 3 + 6 * 4 * 2 + 7
    beside = {"1x<2,1> + 2x<1,1>", "1x<2,1> + 1x<1,2>", "1x<1,2> + 2x<1,1>"} & {*first["rehearsed"]}
    alone = {"4x<1,1>", "2x<2,1>", "2x<1,2>", "1x<4,1>", "1x<2,2>", "1x<1,4>"}
    assert len(beside) == 2  # of three schemes on half of the ranks
    assert {*first["rehearsed"]} == alone | beside
    # Once more what shows a scheme that nothing else does
    assert len(first["rehearsed"]) == len(alone | beside) + 3
    assert first["rehearsed"].count("1x<4,1>") == first["rehearsed"].count("1x<2,2>") == 2
    for entry in document["schemes"]:
        runs, factor = entry["rehearsed"]["runs"], entry["rehearsed"]["factor"]
        assert factor > 0
        assert all(str(Scheme.from_json(entry)) in r["strategy"] for r in runs)


@pytest.mark.parametrize("value", [0.5, -1, float("nan"), "1.5", True, [1]])
@pytest.mark.parametrize("key", ["overlap_slowdown", "ranks_per_core"])
def test_a_ratio_of_the_hardware_that_cannot_be_is_refused(key, value):
    document = json.loads(find_file("profiles", "a800_llama2_7b").read_text())
    document["hardware"][key] = value
    with pytest.raises(HydraConfigError, match=rf"hardware\.{key} is .*, expected a number from 1"):
        Profile.from_json(document)


def ranks_of_a_core(cases):
    """By cores and threads of each rank."""
    found = []
    for cores, num_threads in cases:
        os.sched_setaffinity(0, cores[dist.get_rank()])
        torch.set_num_threads(num_threads)
        found.append(find_ranks_per_core(Hosts(("a", "b"), (0, 0, 1)), CPU))
    return found


@pytest.mark.distributed
def test_ranks_of_a_core_are_counted_on_the_fullest_host():
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        pytest.skip("needs two cores")
    both = {first, others[0]}
    cases = [([{first}] * 3, 1), ([{first}, {others[0]}, both], 1), ([both] * 3, 2)]
    assert run_distributed(ranks_of_a_core, 3, cases) == [[2.0, 1.0, 2.0]] * 3
    assert find_ranks_per_core(Hosts(("a",), (0,)), torch.device("cuda")) == 1.0


@pytest.mark.parametrize(
    ("device", "each", "warmed_up"),
    [("cuda", False, [1, 3]), ("cuda", True, [0, 1, 2, 3]), ("cpu", False, [0, 1, 2])],
)
def test_what_is_touched_or_compiled_for_the_first_time_is_warmed_up(
    monkeypatch, device, each, warmed_up
):
    """Memory of a CPU is the process's, so that one long micro-batch has touched it for all."""
    monkeypatch.setattr(profiler, "has_device_memory", lambda: device != "cpu")
    config = HydraConfig.parse(
        {"context_length": 64, "tokens_per_iteration": 64} | {"profiling": {"repeats": 2}}
    )
    lengths = [("a", 8), ("a", 64), ("b", 16), ("b", 64)]
    cases = [(name, profiler.ProbeMicroBatch(length)) for name, length in lengths]
    seen = []
    times = profiler.measure_in_rounds(
        cases, lambda *case: seen.append(case) or 1.0, config, show_progress=False,
        warms_up_each=each,
    )  # fmt: skip
    assert set(times) == set(cases)
    assert sorted(seen) == sorted([*(cases[n] for n in warmed_up), *cases * 2])


@pytest.mark.distributed
def test_the_command_alone_says_what_would_fit_the_context(tmp_path):
    """One process, one device, one small memory; also: the example of the help and the one
    document.
    """
    model = save_model(tmp_path / "model")
    out = tmp_path / "p.json"
    script = [
        "--model", model, "--context", 4096, "--lengths", "8,16,32", "--repeats", 1, "--out", out,
        "--memory-limit", 3_000_000, "--json",
    ]  # fmt: skip
    ((refused, code, stdout, stderr),) = run_distributed(run_command, 1, model, script)
    assert "has memory for micro-batches" in refused
    assert code == 0, stderr
    assert json.loads(stdout) == json.loads(out.read_text())
    for advice in (
        "no scheme fits a micro-batch of 4096 tokens",
        "lower the context to",
        "checkpointing",
    ):
        assert advice in stderr


def run_command(model, script):
    """What a memory that is too small is told, and what the command prints."""
    with pytest.raises(HydraConfigError) as refused:
        run_profile(request_for(model, memory_limit_bytes=10_000), CPU)
    os.environ["WORLD_SIZE"] = "1"
    result = invoke("profile", *script)
    return str(refused.value), result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(("total", "longest"), [(80 << 30, 4096), (3 << 30, 512)])
def test_memory_of_a_token_is_that_of_the_passes_after_the_pull(monkeypatch, total, longest):
    """The pull holds more than the passes of a short micro-batch, as with a vocabulary of 128K."""
    weights, pull, of_token = 1 << 30, 2 << 30, 500_000
    peak, lengths = [0], []
    accelerator = SimpleNamespace(
        device_name=lambda: "standin",
        empty_cache=lambda: None,
        total_memory=lambda: total,
        memory_allocated=lambda: weights,
        reset_peak_memory_stats=lambda: peak.append(weights),
        max_memory_allocated=lambda: peak[-1],
    )

    def stage_ms(propagator, strategy, micro_batch, *, at_begin):
        lengths.append(micro_batch.length)
        peak[-1] = max(peak[-1], weights + pull)
        assert at_begin() is None
        peak[-1] = max(peak[-1], weights + of_token * micro_batch.length)

    monkeypatch.setattr(profiler, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(profiler, "measure_stage_ms", stage_ms)
    propagator = SimpleNamespace(max_over_ranks=lambda value: value)
    assert profiler.token_bytes(propagator, None, 4096) == of_token
    assert max(lengths) == longest


def test_what_is_in_use_outside_of_torch_is_what_torch_has_not_got(monkeypatch):
    accelerator = SimpleNamespace(device_name=lambda: "fake", memory_reserved=lambda: 50)
    monkeypatch.setattr(memory, "get_accelerator", lambda: accelerator)
    assert memory.outside_bytes() == 0  # a device that does not tell
    fake = SimpleNamespace(mem_get_info=lambda: (30, 100))
    monkeypatch.setattr(torch, "fake", fake, raising=False)
    assert memory.outside_bytes() == 20


def filled(monkeypatch, run_once, *, memory_bytes=10_000_000, peak_bytes=0, tokens=100_000):
    """Fills the memory of two ranks of `<1,1>` and `<2,1>` with a profile of so many bytes."""
    accelerator = SimpleNamespace(
        device_name=lambda: "fake",
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda: None,
        max_memory_allocated=lambda: peak_bytes,
        memory_reserved=lambda: 10,
        available_memory=lambda: 20,
    )
    monkeypatch.setattr(profiler, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(memory, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(profiler, "run_once", run_once)
    profile = Profile.from_json(small_profile(memory_bytes, num_layers=4))
    strategies = [Strategy.parse(text) for text in ("2x<1,1>", "1x<2,1>")]
    propagator = SimpleNamespace(num_ranks=2, rank=0, max_over_ranks=lambda value: value)
    config = HydraConfig(context_length=64, tokens_per_iteration=tokens)
    with memory.naming_memory_limit(memory_bytes):
        profiler._fill_memory(propagator, {s.schemes[0]: s for s in strategies}, profile, config)
    return profile


def test_an_iteration_as_long_as_maxlen_allows_is_run_under_the_tightest_scheme(
    monkeypatch, caplog
):
    plans = []
    profile = filled(monkeypatch, lambda _propagator, plan: plans.append(plan))
    longest = {
        s: profile.memory.max_len_tokens(s, 2) for s in map(Scheme.parse, ("<1,1>", "<2,1>"))
    }
    (plan,) = plans
    (scheme,) = set(plan.strategy.schemes)
    assert longest[scheme] == min(longest.values())
    for pipeline in plan.pipelines:
        assert len(pipeline.micro_batches) == scheme.pp
        for micro_batch in pipeline.micro_batches:
            tokens = sum(plan.micro_batch_lengths(micro_batch))
            assert longest[scheme] - len(micro_batch) < tokens <= longest[scheme]
    assert max(plan.lengths) <= 64
    assert not caplog.messages


def test_more_memory_than_the_profile_says_is_told_with_a_limit(monkeypatch, caplog):
    filled(monkeypatch, lambda *_: None, peak_bytes=20_000_000)
    (message,) = caplog.messages
    assert "0.02 GB at the peak, where the profile says 0.01" in message
    limit = int(message.rsplit(" ", 1)[1])
    assert 0.45 * 10_000_000 <= limit <= 0.55 * 10_000_000


def test_memory_that_is_there_anyway_is_not_told(monkeypatch, caplog):
    """Iterations of few tokens fill a part of it, whatever a tiny model's profile says."""
    filled(monkeypatch, lambda *_: None, peak_bytes=9_000_000, tokens=128)
    assert not caplog.messages


def test_a_device_that_maxlen_overfills_names_the_memory_limit(monkeypatch):
    def run_out(*_):
        raise torch.OutOfMemoryError("no memory left")

    with pytest.raises(HydraConfigError, match="to 27, for which plans"):
        filled(monkeypatch, run_out)
