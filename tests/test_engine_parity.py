"""Gradients and loss do not depend on the strategy: they equal one process that runs each sequence
alone.
"""

from __future__ import annotations

import copy
import itertools

import kernels_apart
import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from engines import loss_and_gradients, start_hydra
from models import VOCAB_SIZE, tiny, with_a_mixer
from single_process import (
    Examples,
    load_of,
    num_label_tokens,
    random_examples,
    token_mean_gradients,
)
from transformers.models.olmo_hybrid import modeling_olmo_hybrid

from ds_hydra.engine.losses import loss as losses
from ds_hydra.engine.model import packing_probe
from ds_hydra.engine.model.scheme_support import can_run
from ds_hydra.engine.model.stage_forward import StageForward
from ds_hydra.engine.parallel import linear
from ds_hydra.sampler.cuts import cut_micro_batches
from ds_hydra.sampler.plan import IterationPlan, PipelinePlan
from ds_hydra.strategy import Strategy

RELATIVE_TOLERANCE = 1e-5
"""fp32 sums over a row in another order than over its sequences; measured errors are below 1e-6."""

STRATEGIES = {
    3: ("3x<1,1>", "1x<2,1> + 1x<1,1>", "1x<1,3>", "1x<1,2> + 1x<1,1>"),
    1: ("1x<1,1>",),
}
"""By number of ranks; those of four are in `test_parity_table.py`."""

LENGTHS = (33, 5, 17, 64, 9, 2, 41, 12, 3)


def hand_plan(
    strategy: Strategy | str, examples: Examples, *, empty_pipeline: bool = False
) -> IterationPlan:
    """Rows of one to three sequences, dealt round; the last pipeline of several gets none if
    `empty_pipeline`.
    """
    strategy = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    lengths = [len(example["input_ids"]) for example in examples]
    num_busy = len(strategy.schemes) - (empty_pipeline and len(strategy.schemes) > 1)
    pipelines = []
    for index, (scheme, ranks) in enumerate(zip(strategy.schemes, strategy.place(), strict=True)):
        mine = [i for i in range(len(lengths)) if i % num_busy == index]
        cuts = [0, 1, 3, 6, len(mine)]
        rows = tuple(tuple(mine[a:b]) for a, b in itertools.pairwise(cuts) if mine[a:b])
        pipelines.append(
            PipelinePlan(
                scheme=scheme,
                ranks=ranks,
                micro_batches=rows,
                makespan_ms=0,
                lower_bound_ms=0,
                rows=cut_micro_batches(rows, lengths, scheme.cp),
            )
        )
    return IterationPlan(
        iteration=0,
        num_devices=dist.get_world_size(),
        strategy=strategy,
        sample_indices=tuple(range(len(lengths))),
        lengths=tuple(lengths),
        num_label_tokens=num_label_tokens(examples),
        pipelines=tuple(pipelines),
        makespan_ms=0,
        lower_bound_ms=0,
    )


def gradients_under(engine, text, examples):
    """Full gradients of one plan by hand under the strategy that `text` names."""
    return loss_and_gradients(engine, hand_plan(text, examples), load_of(examples))[1]


def relative_errors(got, wanted, names):
    """Norm-wise error of each gradient, against its own norm or a thousandth of the largest, if
    larger.
    """
    floor = max(float(w.norm()) for w in wanted) * 1e-3
    return {
        name: float((g - w).norm()) / max(float(w.norm()), floor)
        for name, g, w in zip(names, got, wanted, strict=True)
    }


def worst_errors(engine, plan, examples, wanted_loss, gradients):
    """Of the passes of `plan`, against the gradients of one process by name: the largest error of a
    gradient, its name, and the error of the loss.
    """
    stage_model = engine.propagator.stage_model
    name_of = {id(p): name for name, p in engine.module.named_parameters()}
    names = [name_of[id(p)] for p in stage_model.params]
    loss, got = loss_and_gradients(engine, plan, load_of(examples))
    errors = relative_errors(got, [gradients[name] for name in names], names)
    name = max(errors, key=errors.get)
    bindings = [b for unit in stage_model.units for b in unit.bindings]
    own = (b.module._parameters[b.attribute] is stage_model.params[b.param] for b in bindings)
    assert all(own), f"{plan.strategy}: the model has other parameters than before"
    held = [p for _, params in stage_model._in_place.slices for p in params.values()]
    assert all(p is None or p.is_meta for p in held), f"{plan.strategy}: slices outlived"
    return errors[name], name, abs(loss / wanted_loss - 1)


def found_once(find):
    """What `find()` returns on rank 0, on all ranks, whose cores have other things to do."""
    found = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def run_alone(reference, examples):
    """Loss, and gradients by name, of one process."""
    loss, gradients = found_once(lambda: token_mean_gradients(reference, examples))
    names = [name for name, _ in reference.named_parameters()]
    return loss, dict(zip(names, gradients, strict=True))


def check_gradients(
    family, strategies, hydra=None, overrides=None, lengths=LENGTHS, unlabelled=0.0, **sections
):
    """The first part `unlabelled` of every sequence does not count, and nothing of the longest."""
    linear.LEAST_NUMEL.clear()  # gradients add up in products, as those of large weights
    model = family if isinstance(family, torch.nn.Module) else tiny(family, **(overrides or {}))
    reference = copy.deepcopy(model)
    examples = random_examples(lengths, VOCAB_SIZE, seed=1)
    for example in examples if unlabelled else ():
        length = len(example["labels"])
        example["labels"][: length if length == max(lengths) else int(length * unlabelled)] = -100
    wanted = run_alone(reference, examples)
    engine = start_hydra(model, hydra=hydra, **sections)
    worst = {}
    for text in strategies:
        strategy = Strategy.parse(text)
        for empty_pipeline in (False, True) if len(strategy.schemes) > 1 else (False,):
            plan = hand_plan(strategy, examples, empty_pipeline=empty_pipeline)
            worst[text, empty_pipeline] = worst_errors(engine, plan, examples, *wanted)
    engine.destroy()  # its threads look for messages a hundred times in a second
    return worst


def assert_parity(worst):
    for case, (error, name, loss_error) in worst.items():
        assert error <= RELATIVE_TOLERANCE, f"{case}: gradient of {name} is off by {error:.1e}"
        assert loss_error <= RELATIVE_TOLERANCE, f"{case}: loss is off by {loss_error:.1e}"


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_equal_one_process_on_other_numbers_of_ranks(world_size):
    assert_parity(
        run_distributed(check_gradients, world_size, "llama_tied", STRATEGIES[world_size])[0]
    )


def check_prompts(family, strategies):
    """The number of tokens of each micro-batch that the head of the first rank was asked about."""
    asked = []
    hook_head = StageForward.hook_head

    def hook_and_count(forward):
        hook_head(forward)
        head = forward._head
        head.register_forward_pre_hook(lambda _head, args: asked.append(args[0].shape[1]))

    StageForward.hook_head = hook_and_count
    lengths = (64, 16, 8, 40, 32, 12)
    worst = check_gradients(family, strategies, lengths=lengths, unlabelled=0.75)
    return worst, asked


@pytest.mark.distributed
def test_the_head_is_asked_about_labelled_tokens_alone():
    strategies = ("1x<2,1>", "1x<1,2>", "1x<sp2,1>", "1x<cp2,1>", "2x<1,1>")
    worst, asked = run_distributed(check_prompts, 2, "llama_tied", strategies)[0]
    assert_parity(worst)
    # Under `2x<1,1>` the first rank has 64, then 8 and 32 tokens; with an empty pipeline 64,
    # then 16 and 8, then the rest. Of the 64 none counts, and the head is asked about one.
    assert asked[-5:] == [1, 2 + 8, 1, 4 + 2, 10 + 8 + 3]


@pytest.mark.slow
@pytest.mark.distributed
def test_sequences_run_one_by_one_are_asked_about_labelled_tokens_alone():
    worst, _ = run_distributed(check_prompts, 2, "bloom", ("2x<1,1>", "1x<1,2>"))[0]
    assert_parity(worst)


def check_chunks():
    """Head and loss five tokens at a time, by half of the vocabulary."""
    losses._CHUNK_ELEMENTS["cpu"] = 5 * (VOCAB_SIZE // 2 + 1)
    numbers = []
    chunks_of = losses.HeadLoss.chunks

    def counting(of, device):
        chunks = list(chunks_of(of, device))
        numbers.append(len(chunks))
        return chunks

    losses.HeadLoss.chunks = counting
    of_both = ("1x<2,1>", "1x<1,2>", "2x<1,1;gather>")
    capped = (*of_both, "1x<sp2,1>", "1x<cp2,1>")
    for family, strategies in (("llama_tied", of_both), ("gemma2", capped)):
        assert_parity(check_gradients(family, strategies))
    assert max(numbers) > 10 or dist.get_rank() == 0


@pytest.mark.distributed
def test_head_and_loss_in_chunks_have_the_gradients_of_one_process():
    run_distributed(check_chunks, 2)


def check_structures():
    for family, schemes in {
        "gpt2": ("2x<1,1>", "1x<1,2>", "1x<sp2,1>", "1x<1,2;ckpt=1>"),
        "gpt_neox": ("1x<2,1>", "1x<1,2>"),
        "stablelm": ("1x<1,2>", "1x<1,2;ckpt=2>"),
        "bloom": ("2x<1,1>", "1x<1,2>"),
        "apertus": ("1x<2,1>",),
        "minicpm3": ("1x<2,1>",),
        "prophetnet": ("2x<1,1>",),
        "olmo_hybrid": ("1x<1,2>", "1x<2,1>", "2x<1,1;gather>"),
    }.items():
        assert_parity(check_gradients(family, schemes))
    assert_parity(check_gradients(with_a_mixer("minicpm3"), ("1x<2,1>",)))


@pytest.mark.slow
@pytest.mark.distributed
def test_other_structures_have_the_gradients_of_one_process():
    run_distributed(check_structures, 2)


def check_boundaries():
    """Layers with states in packed micro-batches, where kernels keep sequences apart."""
    told = kernels_apart.install(modeling_olmo_hybrid)
    strategies = ("2x<1,1>", "1x<1,2>", "1x<1,2;ckpt=1>", "2x<1,1;gather>")
    assert_parity(check_gradients("olmo_hybrid", strategies))
    assert any(len(lengths) > 2 for lengths in told)


def check_hybrid(model_type):
    """Modules with states run each sequence, everything else the packed micro-batch."""
    from benchmarks.families import HYDRA, LENGTHS, build

    model = build(model_type)
    stage_model = packing_probe.build_stage_model(model)
    strategies = ["2x<1,1>", "1x<1,2;ckpt=1>", "2x<1,1;ckpt=1;gather>", "1x<2,1>"]
    runs = [s for s in strategies if can_run(stage_model, Strategy.parse(s).schemes[0])]
    worst = check_gradients(model, runs, HYDRA, lengths=LENGTHS)
    return worst, stage_model.abilities, runs


HYBRIDS = {
    "nemotron_h": "NemotronHMamba2Mixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "falcon_h1": "FalconH1Mixer",
    "lfm2": "Lfm2ShortConv",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "kimi_linear": "KimiLinearDeltaAttention",
    "jamba": "JambaMambaMixer",
    "bamba": "BambaMixer",
}
"""Types of models with states, and the class of their modules that carry them."""
IN_CI = ("lfm2", "qwen3_next")
"""Types of HYBRIDS with a convolution and a delta net."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(t, marks=pytest.mark.slow if t in IN_CI else pytest.mark.nightly)
        for t in HYBRIDS
    ],
)
def test_hybrids_are_packed_gathered_and_checkpointed(model_type):
    worst, abilities, runs = run_distributed(check_hybrid, 2, model_type)[0]
    assert_parity(worst)
    assert abilities.apart == {HYBRIDS[model_type]}
    assert not abilities.one_by_one_because
    assert {"2x<1,1>", "1x<1,2;ckpt=1>", "2x<1,1;ckpt=1;gather>"} <= set(runs)


@pytest.mark.distributed
def test_kernels_that_keep_sequences_apart_have_the_gradients_of_one_process():
    run_distributed(check_boundaries, 2)


def check_resized():
    """Embedding and head of different row counts, the padding token among the rows."""
    for part, more in (("embed_tokens", 9), ("lm_head", 9), ("lm_head", 2)):
        model = tiny("llama")
        resize(model, part, more)
        assert_parity(check_gradients(model, ("1x<2,1>", "1x<1,2>")))


def resize(model, part, more):
    owner = model.model if part == "embed_tokens" else model
    old = getattr(owner, part)
    weight = torch.cat([old.weight, old.weight[:more] * 0.5]).detach()
    if part == "embed_tokens":
        new = torch.nn.Embedding(*weight.shape, padding_idx=old.padding_idx)
    else:
        new = torch.nn.Linear(*weight.T.shape, bias=False)
    new.weight = torch.nn.Parameter(weight)
    setattr(owner, part, new)


@pytest.mark.slow
@pytest.mark.distributed
def test_embedding_and_head_may_have_different_numbers_of_rows():
    run_distributed(check_resized, 2)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 5.0, 9.0],
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
LENGTHS_BY_TURNS = (20, 5, 33, 15, 64, 9, 65, 12, 3)
"""One process remembers the longest sequence; each long one is longer than those before."""


def check_ropes():
    strategies = ("2x<1,1>", "1x<2,1>", "1x<1,2>", "1x<sp2,1>", "1x<cp2,1>", "1x<1,1>")
    for parameters in ROPES.values():
        overrides = {"rope_parameters": parameters, "max_position_embeddings": 16}
        assert_parity(check_gradients("llama", strategies, None, overrides, LENGTHS_BY_TURNS))


@pytest.mark.distributed
def test_rotary_embeddings_follow_the_length_of_each_sequence():
    run_distributed(check_ropes, 2)
