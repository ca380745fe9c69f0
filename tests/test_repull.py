"""Layers that are dropped and pulled again change memory and traffic, and no bit of a result."""

from __future__ import annotations

import functools
import signal
import time
from random import Random

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from engines import start_hydra
from faults import die, mark_fault, run_until_end
from models import VOCAB_SIZE, tiny
from single_process import random_examples
from test_engine_link import random_cases, train_plan
from test_engine_parity import assert_parity, check_gradients

from ds_hydra.engine.profiler import token_bytes
from ds_hydra.engine.slices import SlicePool, slice_numel
from ds_hydra.errors import HydraConfigError, RankLostError
from ds_hydra.strategy import Scheme, Strategy

NUM_LAYERS = 6
PARITY_STRATEGIES = (
    "4x<1,1>",
    "1x<4,1>",
    "1x<2,2>",
    "1x<1,3> + 1x<1,1>",
    "1x<2,1> + 1x<1,1>",
    "1x<1,2>",
)


def delay_messages(service, random):
    """Make sends and receipts begin up to 2 ms late, so that threads and ranks meet in many orders."""

    def slow(link):
        for name in ("begin_send", "begin_receive"):

            def late(begin, *arguments):
                time.sleep(random.random() * 2e-3)
                return begin(*arguments)

            setattr(link, name, functools.partial(late, getattr(link, name)))

    slow(service.receiver[1])
    for reader in range(dist.get_world_size()):
        slow(service.feeder(reader)[1])


def results_with_and_without(num_sequences):
    """Cases whose bits differ between re-pulls (with and without overlap) and none; and how much was re-pulled."""
    engines = {
        name: start_hydra(tiny("llama_tied", num_hidden_layers=5), hydra={"link": link})
        for name, link in (
            ("none", {}),
            ("all", {"repull_layers": "all"}),
            ("some, in line", {"repull_layers": 3, "overlap": False}),
        )
    }
    delay_messages(engines["all"].hydra.propagator.repull_service, Random(dist.get_rank()))
    different, repulled_ms = [], dict.fromkeys(engines, 0.0)
    for number, plan, tensors in random_cases(num_sequences, seed=1):
        bits = {}
        for name, engine in engines.items():
            outcome, grads_P = train_plan(engine, plan, tensors)
            evaluated = engine.hydra.propagator.evaluate(plan, tensors.__getitem__)
            repulled_ms[name] += outcome.repull_ms
            assert outcome.propagate_ms >= outcome.visible_repull_ms
            bits[name] = (outcome.loss_sum, evaluated.loss_sum, grads_P)
        for name, (loss, evaluated_loss, grads_P) in bits.items():
            same = (loss, evaluated_loss) == bits["none"][:2]
            if not same or not all(map(torch.equal, grads_P, bits["none"][2])):
                different.append((number, name, str(plan.strategy), plan.lengths))
    return different, repulled_ms


def frozen_models():
    """Largest difference of losses and trained weights with and without re-pulls, where parts are frozen."""
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    results = []
    for link in ({}, {"repull_layers": "all"}):
        model = tiny("llama", num_hidden_layers=NUM_LAYERS)
        for name, param in model.named_parameters():
            param.requires_grad_("layers.2.mlp" in name or "layers.4" in name)
        model.get_input_embeddings().register_forward_hook(lambda _m, _a, out: out.requires_grad_())
        engine = start_hydra(model, hydra={"link": link})
        losses = []
        for text in ("4x<1,1>", "4x<1,1>", "1x<2,1> + 1x<1,2>", "1x<2,2>"):
            losses.append(float(engine.train_batch(examples, strategy=text)))
        losses.append(float(engine.eval_batch(examples, strategy="2x<2,1>")))
        results.append((losses, [p.ds_tensor.clone() for p in engine.hydra.skeleton.params]))
    (losses, weights), (others, other_weights) = results
    return losses == others and all(map(torch.equal, weights, other_weights)), len(set(losses))


def memory():
    """(stated, held by the pool, packed buffers in use) with all layers re-pulled, some, and none, by strategy."""
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    found = {}
    for wanted in ("all", 4, 0):
        model = tiny("llama_bias", num_hidden_layers=NUM_LAYERS)
        engine = start_hydra(model, hydra={"link": {"repull_layers": wanted}})
        propagator = engine.hydra.propagator
        propagator.pool = SlicePool(torch.device("cpu"), exact=True)
        layer = engine.hydra.skeleton.buckets(Scheme(1, 1), 0, 0)[1]
        found["layer"] = slice_numel(propagator.skeleton.specs, layer) * 4
        for text in ("4x<1,1>", "2x<2,1>", "1x<1,2> + 1x<1,1>"):
            service = propagator.repull_service
            for buffers in service._buffers:
                buffers.peak_bytes = 0
            engine.train_batch(examples, strategy=text)
            stated = propagator.link_memory(Strategy.parse(text))
            found[wanted, text] = stated, propagator.pool.nbytes, service.peak_bytes
        found["token", wanted] = token_bytes(propagator, Strategy.parse("2x<2,1>"), 16)
    return found


def refusal():
    """Both errors reach every rank when the engine starts."""
    with pytest.raises(HydraConfigError, match="repull_layers is 7, the model has 6 layers"):
        start_hydra(tiny("llama", num_hidden_layers=NUM_LAYERS), hydra={"link": {"repull_layers": 7}})
    return True


def after_a_failure():
    """What an iteration raises that fails on all ranks with re-pulls under way, and the one after it."""
    engine = start_hydra(
        tiny("llama", num_hidden_layers=NUM_LAYERS), hydra={"link": {"repull_layers": "all"}}
    )
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    _, link = engine.hydra.propagator.repull_service.feeder((dist.get_rank() + 1) % 4)
    begin = link.begin_send
    sent = []

    def fail_at_the_fourth(*arguments):
        sent.append(arguments)
        if len(sent) == 4:
            raise OSError("serving is broken on purpose")
        return begin(*arguments)

    link.begin_send = fail_at_the_fourth
    raised = []
    for _ in range(2):
        try:
            engine.train_batch(examples, strategy="4x<1,1>")
        except (OSError, RankLostError) as error:
            raised.append(f"{type(error).__name__}: {error}")
    return raised


def checks():
    repull = {"link": {"repull_layers": "all"}}
    again = {"link": {"repull_layers": 4}, "activation_checkpointing": True}
    layers = {"num_hidden_layers": NUM_LAYERS}
    return {
        "parity": check_gradients("llama_bias", PARITY_STRATEGIES, repull, layers),
        "checkpointing": check_gradients("llama_tied", ("1x<2,2>", "1x<1,2> + 1x<1,1>"), again, layers),
        "different": results_with_and_without(20),
        "frozen": frozen_models(),
        "memory": memory(),
        "refusal": refusal(),
        "failure": after_a_failure(),  # last: its messages stay under way
    }


@pytest.fixture(scope="module")
def results():
    """What `checks` found on each of 4 ranks, started once."""
    return run_distributed(checks, 4, timeout_s=900)


@pytest.mark.distributed
def test_gradients_equal_one_process(results):
    assert_parity(results[0]["parity"])
    assert_parity(results[0]["checkpointing"])


@pytest.mark.distributed
def test_re_pulls_change_no_bit_of_random_sequences_of_strategies(results):
    for rank, result in enumerate(results):
        different, repulled_ms = result["different"]
        assert different == [], f"rank {rank}"
        assert repulled_ms["none"] == 0
        assert min(repulled_ms["all"], repulled_ms["some, in line"]) > 0


@pytest.mark.distributed
def test_frozen_layers_are_pulled_again_where_a_pass_needs_them(results):
    for result in results:
        is_same, num_losses = result["frozen"]
        assert is_same
        assert num_losses > 2, "nothing was trained"


@pytest.mark.distributed
def test_a_rank_holds_two_of_its_re_pulled_layers(results):
    for rank, result in enumerate(results):
        found = result["memory"]
        for case, (stated, held, in_use) in ((c, f) for c, f in found.items() if isinstance(f, tuple)):
            if stated.slice_bytes:
                assert held == stated.slice_bytes + stated.gradient_bytes, (rank, case)
            assert in_use <= stated.serving_bytes, (rank, case)
        every, some, none = (found[wanted, "4x<1,1>"][0] for wanted in ("all", 4, 0))
        assert none.slice_bytes - every.slice_bytes == pytest.approx(
            (NUM_LAYERS - 2) * found["layer"], rel=0.02
        )
        assert none.slice_bytes - some.slice_bytes == pytest.approx((4 - 2) * found["layer"], rel=0.02)
        assert none.serving_bytes == 0 < every.serving_bytes
        assert found["all", "2x<2,1>"][2] > 0


@pytest.mark.distributed
def test_a_profile_counts_the_same_activations(results):
    for result in results:
        found = result["memory"]
        assert found["token", "all"] == found["token", 4] == found["token", 0] > 0


@pytest.mark.distributed
def test_what_the_model_has_not_is_refused_on_every_rank(results):
    assert all(result["refusal"] for result in results)


@pytest.mark.distributed
def test_an_error_while_serving_is_raised_and_nothing_is_served_after_it(results):
    for result in results:
        first, second = result["failure"]
        assert first == "OSError: serving is broken on purpose"
        assert second.startswith(
            "RankLostError: an earlier error left an exchange between ranks in the middle"
        )


def one_rank_ends(folder, how, watchdog):
    """Rank 1 dies or fails in the middle of the second iteration's re-pulls."""
    engine = start_hydra(
        tiny("llama_tied", num_hidden_layers=NUM_LAYERS),
        hydra={"link": {"repull_layers": "all"}, "faults": {"watchdog": watchdog, "grace_s": 1}},
    )
    examples = random_examples((9, 5, 14, 7), VOCAB_SIZE, seed=0)
    engine.train_batch(examples, strategy="3x<1,1>")
    if dist.get_rank() == 1:
        begin = engine.hydra.propagator.repull_service.receiver[1].begin_receive

        def end(plan, index, *arguments):
            if index == 4:
                if how == "dies":
                    die(folder)
                mark_fault(folder)
                raise MemoryError("no room left, on purpose")
            return begin(plan, index, *arguments)

        engine.hydra.propagator.repull_service.receiver[1].begin_receive = end
    engine.train_batch(examples, strategy="3x<1,1>")


@pytest.mark.distributed
@pytest.mark.timeout(700)
@pytest.mark.parametrize(("how", "watchdog"), [("dies", False), ("fails", True)])
def test_all_ranks_end_where_one_is_lost_between_re_pulls(tmp_path, how, watchdog):
    ended = run_until_end(one_rank_ends, 3, tmp_path, str(tmp_path), how, watchdog)
    assert ended[1].exit_code == (-signal.SIGKILL if how == "dies" else 1)
    for rank in (0, 2):
        assert ended[rank].exit_code in (1, 75), ended[rank].stderr
        if watchdog:
            failure = "rank 1 failed in propagation: MemoryError: no room left, on purpose; rank"
            assert failure in ended[rank].stderr
        else:
            assert "by peer" in ended[rank].stderr  # gloo: the connection was closed, or reset
    assert how == "dies" or "MemoryError: no room left, on purpose" in ended[1].stderr
