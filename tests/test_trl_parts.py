"""What HydraMixin is made of: batches taken apart, losses of their derivatives, arguments, and the
names of TRL that it stands on.
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace

import pytest
import torch
import trl
from accelerate.state import AcceleratorState
from models import tiny
from trl_runs import arguments, make_tokenizer, pairs, texts

from ds_hydra.engine.losses.objective import Scores
from ds_hydra.engine.model.experts import BalanceLoss
from ds_hydra.errors import HydraConfigError
from ds_hydra.trainer.arguments import check_overrides
from ds_hydra.trl import HydraMixin, HydraSFTTrainer
from ds_hydra.trl.mixin import (
    NOT_CALLED_OF_TRL,
    ReferenceMixin,
    _names_of_pairs,
    add_deepspeed,
    check_trainer,
    check_trl_arguments,
    complete_section,
)
from ds_hydra.trl.scored_model import Given, ScoredModel, Sequences, Span, Weighted, read_sequences


def config(kind=trl.SFTConfig, **settings):
    settings = arguments("unused", 1, **settings)
    if not issubclass(kind, trl.SFTConfig | trl.DPOConfig):
        del settings["max_length"]
    return kind(**settings)


def test_padding_is_taken_away_on_both_sides_and_put_back():
    ids = torch.tensor([[0, 5, 6, 7], [8, 9, 0, 0], [0, 0, 3, 0], [0, 0, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    found = Sequences.read(ids, mask)
    # One token predicts nothing, and so does none
    assert found.spans == (Span(0, 1, 4), Span(1, 0, 2))
    assert [tokens.tolist() for tokens in found.ids] == [[5, 6, 7], [8, 9]]
    values = [torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 3.0])]
    spread = found.spread(values)
    wanted = [[0, 1, 2], [3, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert spread.tolist() == wanted
    back = found.collect(spread)
    assert [b.tolist() for b in back] == [v.tolist() for v in values]
    assert [b.tolist() for b in found.collect(None)] == [[0, 0, 0], [0, 0]]


def test_flattened_rows_are_taken_apart_where_positions_begin():
    ids = torch.arange(8)[None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])  # what a multiple pads has position 0
    assert Sequences.read(ids, None, positions).spans == (Span(0, 0, 3), Span(0, 3, 5))
    positions = torch.tensor([[5, 6, 7, 0, 1, 9, 10, 11]])  # what goes on from another row counts
    found = (Span(0, 0, 3), Span(0, 3, 5), Span(0, 5, 8))
    assert Sequences.read(ids, None, positions).spans == found
    mask = torch.ones(1, 8, dtype=torch.int64)
    assert Sequences.read(ids, mask, 3 + ids).spans == (Span(0, 0, 8),)
    with pytest.raises(HydraConfigError, match="'position_ids' of row 0 of a batch begin anew"):
        Sequences.read(ids, mask, positions)


def test_masks_with_holes_and_what_no_text_has_are_refused():
    with pytest.raises(
        HydraConfigError, match=r"row 0 of a batch has 2 ones between place 0 and 2"
    ):
        Sequences.read(torch.ones(1, 3).long(), torch.tensor([[1, 0, 1]]))
    with pytest.raises(HydraConfigError, match="the batch has 'pixel_values', which is not used"):
        read_sequences({"input_ids": torch.ones(1, 2), "pixel_values": torch.ones(1)})


def scored(log_probs, entropy):
    """A model that gives these values for one sequence, and calls no engine."""
    scores = Scores((log_probs,), (entropy,), (torch.zeros(3),), (torch.zeros(3),))
    ids = torch.tensor([[4, 5, 6]])
    return ScoredModel(None, Given(None, [Sequences.read(ids)], scores)), ids


def test_the_derivatives_of_any_loss_are_its_gradient():
    """A loss of log-probabilities and entropies, against the same one differentiated as a whole."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 7, generator=generator, requires_grad=True)
    ids = torch.tensor([[4, 5, 6]])
    all_log_probs = logits.log_softmax(-1)[0, :-1]
    log_probs = all_log_probs.gather(-1, ids[0, 1:, None])[:, 0]
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)

    def loss_of(log_probs, entropy):
        return (log_probs.sum().sigmoid() * 3 - 0.1 * (entropy.square()).mean()).square()

    (wanted,) = torch.autograd.grad(loss_of(log_probs, entropy), logits, retain_graph=True)
    zero = torch.zeros(1)
    model, ids = scored(*(torch.cat([zero, v.detach()]) for v in (log_probs, entropy)))
    outputs = model(input_ids=ids, labels=ids, fused_lm_head=True)
    loss_of(outputs.log_probs[0], outputs.entropy[0]).backward()
    ((weights,), (entropy_weights,)) = model.calls[0].weights(1.0)
    surrogate = (weights[1:] * log_probs).sum() + (entropy_weights[1:] * entropy).sum()
    (found,) = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(found, wanted)
    assert weights[0] == entropy_weights[0] == 0


def test_labels_say_what_counts_and_logits_are_refused():
    model, ids = scored(torch.tensor([0.0, -1.0, -2.0]), torch.zeros(3))
    labels = torch.tensor([[4, -100, 6]])
    outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
    assert outputs.log_probs.tolist() == [[0, -2]]
    assert outputs.label_mask.tolist() == [[False, True]]
    assert outputs.loss.item() == 2
    with pytest.raises(HydraConfigError, match="compute_loss asks the model for logits"):
        model(input_ids=ids)


def test_weights_need_no_normaliser_and_may_all_be_zero():
    assert Weighted().normaliser([], []) == 1
    assert Weighted().token_fields == ("weight",)
    assert Weighted(with_entropy=True, label_smoothing=0.1).needs_mean_log_prob


def test_what_trl_says_is_honoured_without_a_word():
    notes = []
    of_trl = {"packing": True, "completion_only_loss": False, "eos_token": "<eos>"}
    of_loop = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}
    check_trl_arguments(config(**of_trl, **of_loop, loss_type="dft"), notes.append)
    check_trl_arguments(config(trl.DPOConfig, loss_type=["ipo", "sft"], ld_alpha=0.1), notes.append)
    assert notes == []


def test_a_script_without_deepspeed_gets_it(monkeypatch):
    args = config(gradient_accumulation_steps=3, max_length=96)
    add_deepspeed(args)
    assert args.deepspeed_plugin.zero_stage == 3
    made = args.hf_deepspeed_config.config
    complete_section(made, args, tiny("llama"))
    assert made["gradient_accumulation_steps"] == 1
    assert made["hydra"] == {"context_length": 96, "tokens_per_iteration": 96 * 8 * 3}
    own = {"hydra": {"context_length": 64}}
    complete_section(own, config(max_length=None), tiny("llama"))
    assert own["hydra"]["context_length"] == 64
    unlimited = {}
    complete_section(unlimited, config(max_length=None), tiny("llama"))
    assert unlimited["hydra"]["context_length"] == 256  # positions of the model
    monkeypatch.setitem(os.environ, "ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    launched = config()
    add_deepspeed(launched)
    assert launched.deepspeed is None


@pytest.fixture
def as_before(monkeypatch):
    """What an Accelerator leaves behind for the next one is taken away."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("as_before")
def test_losses_of_logits_and_given_optimizers_are_refused():
    class Mine(HydraMixin, trl.SFTTrainer):
        pass

    def start(**given):
        return Mine(
            tiny("llama", vocab_size=259),
            config(),
            train_dataset=texts().select(range(2)),
            processing_class=make_tokenizer(),
            **given,
        )

    with pytest.raises(HydraConfigError, match=r"compute_loss_func is .*which gets logits"):
        start(compute_loss_func=lambda *_: 0)
    with pytest.raises(
        HydraConfigError, match=r"BEMACallback loads the state_dict\(\) of the model"
    ):
        start(callbacks=[trl.BEMACallback()])
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(
        HydraConfigError, match="optimizer is a AdamW that was given or made before"
    ):
        start(optimizers=(optimizer, None))
    trainer = start()
    trainer.optimizer = optimizer
    with pytest.raises(
        HydraConfigError, match="optimizer is a AdamW that was given or made before"
    ):
        trainer.train()
    trainer.optimizer = None
    trainer.model.requires_grad_(False)
    with pytest.raises(
        HydraConfigError, match=r"requires gradients, .* call requires_grad_\(True\)"
    ):
        trainer.train()


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(("given", "wanted"), [(None, 0.001), (0.05, 0.05), (0.0, None)])
@pytest.mark.parametrize("kind", [trl.SFTTrainer, trl.DPOTrainer])
def test_the_loss_of_balance_has_the_coefficient_of_the_arguments(kind, given, wanted):
    model = tiny("qwen3_moe", vocab_size=259)  # asks for none, and stock trainers add it
    settings = {} if given is None else {"router_aux_loss_coef": given}
    arguments_class = {trl.SFTTrainer: trl.SFTConfig, trl.DPOTrainer: trl.DPOConfig}[kind]
    settings |= {"precompute_ref_log_probs": True} if kind is trl.DPOTrainer else {}
    data = (pairs() if kind is trl.DPOTrainer else texts()).select(range(2))
    made = type("Mine", (HydraMixin, kind), {})
    given = {"args": config(arguments_class, **settings), "processing_class": make_tokenizer()}
    trainer = made(model, train_dataset=data, **given)
    found = BalanceLoss.find(trainer.model)
    assert (found and found.coefficient) == wanted
    assert not trainer.aux_loss_enabled


def test_an_output_says_what_it_has_in_place_of_logits():
    zeros = tuple(torch.zeros(3) for _ in range(1))
    model = ScoredModel(None, lambda _: Scores(zeros, zeros, zeros, zeros))
    inputs = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[1, 2, 3]])}
    output = model(**inputs)
    for read in (lambda: output.logits, lambda: output["logits"], lambda: output.get("logits")):
        with pytest.raises(HydraConfigError, match=r"reads logits of .*fused_lm_head=True"):
            read()
    assert not hasattr(output, "hidden_states")
    assert output.get("aux_loss") is None
    with pytest.raises(KeyError):
        output["nothing of the kind"]
    assert output["loss"] is output.loss is output[0]
    assert output.to_tuple()[0] is output.loss
    with pytest.raises(HydraConfigError, match=r"model with output_hidden_states=True, which no"):
        model(**inputs, output_hidden_states=True)
    assert model(**inputs, output_router_logits=True).loss is not None


@pytest.mark.parametrize(
    "kind", [trl.KTOTrainer, trl.RewardTrainer, trl.DistillationTrainer, "gkd.GKDTrainer"]
)
def test_other_trainers_of_trl_are_refused_before_anything_is_loaded(kind):
    if isinstance(kind, str):
        module, name = kind.split(".")
        kind = getattr(importlib.import_module(f"trl.experimental.{module}"), name)

    class Mine(HydraMixin, kind):
        pass

    with pytest.raises(HydraConfigError, match=f"Mine is a {kind.__name__} of trl.* does not run"):
        Mine(model="no such folder", args=None)


def test_trainers_of_trl_that_run_are_those_that_are_shipped_and_rloo():
    from ds_hydra.trl import mixin

    for kind in (*vars(mixin).values(), trl.RLOOTrainer, torch.nn.Module):
        if isinstance(kind, type) and kind is not trl.BEMACallback:
            check_trainer(kind)


def test_references_of_a_stream_are_not_known_before_training():
    trainer = SimpleNamespace(args=config(trl.DPOConfig, precompute_ref_log_probs=True))
    stream = texts().to_iterable_dataset()
    with pytest.raises(HydraConfigError, match="the train dataset is an IterableDataset"):
        ReferenceMixin._precompute_ref_logps(trainer, stream, "train", 1)


def test_overrides_on_either_side_of_the_mixin():
    def own(self, *args, **kwargs):
        return None

    base = type("Base", (trl.SFTTrainer,), {"training_step": own, "compute_loss": own})
    before = type("Before", (HydraSFTTrainer,), {"training_step": own, "compute_loss": own})
    check_overrides(object.__new__(before), NOT_CALLED_OF_TRL)
    mixed = type("Mixed", (HydraMixin, base), {})
    with pytest.raises(HydraConfigError, match=r"\n  training_step\(\) of Base: HydraMixin stands"):
        check_overrides(object.__new__(mixed), NOT_CALLED_OF_TRL)


def test_the_mixin_stands_before_the_trainer():
    with pytest.raises(HydraConfigError, match=r"Mine has the Trainer before the mixin .*write it"):
        type("Mine", (trl.SFTTrainer, HydraMixin), {})


def test_pairs_that_a_reference_scores_before_training_are_where_trl_computes():
    trainer = ReferenceMixin.__new__(ReferenceMixin)
    trainer._known_references, trainer._datasets_to_score, seen = {}, [["a", "b", "c"]], []
    trainer.args = SimpleNamespace(process_index=0, world_size=2)
    trainer.data_collator, trainer._learn = tuple, seen.append
    trainer._prepare_input = lambda batch: ("on the device", batch)
    trainer._attach_data()
    assert seen == [("on the device", ("a", "c"))]


def test_pairs_are_known_by_both_answers():
    ids = torch.tensor([[1, 2], [1, 2], [3, 4], [3, 5]])  # the two better ones first
    masks = {"attention_mask": torch.ones_like(ids), "completion_mask": torch.tensor([[0, 1]] * 4)}
    one, other = _names_of_pairs({"input_ids": ids, **masks})
    assert one != other
