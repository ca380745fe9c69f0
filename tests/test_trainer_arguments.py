"""TrainingArguments that are refused, ignored with a message, or mapped; epochs; collators;
overrides.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from types import SimpleNamespace

import datasets
import numpy as np
import pandas
import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime.lr_schedules import WarmupLR
from hypothesis import given
from hypothesis import strategies as st
from models import tiny
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler, Subset, SubsetRandomSampler
from transformers import TrainingArguments
from trl import SFTConfig
from trl_runs import make_tokenizer

import ds_hydra
from ds_hydra.configs import HydraConfig
from ds_hydra.configs.ds_config import read_ds_config, refuse_auto
from ds_hydra.engine import hydra_engine_class
from ds_hydra.engine.checkpointing.files import MANIFEST_NAME
from ds_hydra.engine.hydra_engine import needs_metric
from ds_hydra.errors import HydraConfigError, HydraDataError
from ds_hydra.progress import say_once
from ds_hydra.sampler.data.batches import TokenBudgetSampler, budget_of
from ds_hydra.trainer import HydraTrainer, StrategyProgressCallback
from ds_hydra.trainer.arguments import (
    check_arguments,
    check_data_collator,
    check_dtype,
    check_dtype_of_evaluation,
    check_overrides,
    correct_best_metric,
    drop_batch_size_mismatches,
    find_set,
    is_overridden,
    map_arguments,
)
from ds_hydra.trainer.data import (
    DatasetReader,
    Epochs,
    EvalBatches,
    as_datasets,
    draw_rows,
    pad_examples,
)
from ds_hydra.trainer.mixin import EngineMixin, check_checkpoint

SECTION = {"context_length": 128, "tokens_per_iteration": 512}
HYDRA = HydraConfig.parse(SECTION)
SMALLEST = {"zero_optimization": {"stage": 3}, "hydra": SECTION}


def arguments(**settings):
    return TrainingArguments(output_dir="unused", use_cpu=True, report_to="none", **settings)


@pytest.mark.parametrize(
    ("sections", "settings", "message"),
    [
        (["optimizer"], {"learning_rate": 1e-3}, "learning_rate has no effect: the JSON has the optim"),
        (["optimizer"], {"adam_beta2": 0.9}, "adam_beta2 has no effect: the JSON has the optimizer"),
        (["optimizer"], {"optim": "sgd"}, "optim has no effect: the JSON has the optimizer AdamW"),
        (["optimizer"], {"weight_decay": 0.1, "warmup_steps": 3}, None),
        (["scheduler"], {"lr_scheduler_type": "cosine"}, "the JSON has the scheduler WarmupLR"),
        (["scheduler"], {"warmup_steps": 3}, "warmup_steps has no effect: the JSON has the scheduler"),
        (["optimizer", "scheduler"], {"learning_rate": 1e-3}, None),
    ],
)  # fmt: skip
def test_arguments_that_a_section_of_the_json_stands_for_are_said(sections, settings, message):
    of_json = {
        "optimizer": {"type": "AdamW", "params": {"weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    }
    notes = []
    config = SMALLEST | {key: of_json[key] for key in sections}
    check_arguments(arguments(deepspeed=config, **settings), notes.append)
    assert [message in note for note in notes] == ([True] if message else [])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_evaluation_in_16_bit_does_not_decide_how_weights_are_trained(name):
    """transformers fills "auto" of the JSON in with the switch of evaluation."""
    args = arguments(**{f"{name}_full_eval": True})
    check_dtype_of_evaluation(args, {name: {"enabled": False}})
    check_dtype_of_evaluation(args, {})
    with pytest.raises(HydraConfigError, match=f"set {name}=True, or leave {name}_full_eval out"):
        check_dtype_of_evaluation(args, {name: {"enabled": True}})
    setattr(args, name, True)
    check_dtype_of_evaluation(args, {name: {"enabled": True}})


def test_a_checkpoint_to_resume_from_has_to_be_one(tmp_path):
    whole, state = tmp_path / "checkpoint-4", tmp_path / "checkpoint-4/trainer_state.json"
    whole.mkdir()
    for wrong in (tmp_path, whole, "True"):
        with pytest.raises(HydraConfigError, match=r"has no trainer_state\.json; expected"):
            check_checkpoint(wrong)
    for damaged in ("", '{"epoch": 1', "[]", '{"other": 1}'):
        state.write_text(damaged)
        with pytest.raises(HydraConfigError, match=r"trainer_state\.json that cannot be read"):
            check_checkpoint(whole)
    state.write_text("{}")
    check_checkpoint(f"{whole}/")
    check_checkpoint(True, str(tmp_path))


def test_defaults_are_silent():
    notes = []
    check_arguments(arguments(), notes.append)
    assert map_arguments(arguments(), HYDRA, notes.append) == HYDRA
    assert not notes


@pytest.mark.parametrize(
    ("settings", "section", "wanted", "note"),
    [
        ({"seed": 3}, {}, {"seed": 3}, "TrainingArguments.seed sets hydra.seed to 3"),
        ({"seed": 3, "data_seed": 4}, {}, {"seed": 4}, "data_seed 4 orders the data and draws noise"),
        ({"seed": 3}, {"seed": 9}, {"seed": 9}, None),
        ({"train_sampling_strategy": "sequential"}, {}, {"shuffle": False}, "='sequential' sets hydra.shuffle"),
        ({"activation_checkpointing": True}, {}, {"activation_checkpointing": True}, "sets hydra.activation"),
        ({"neftune_noise_alpha": 5.0}, {}, {"neftune_noise_alpha": 5.0}, "sets hydra.neftune_noise_alpha"),
        ({"full_determinism": True}, {}, {"deterministic": True}, "sets hydra.deterministic to True"),
    ],
)  # fmt: skip
def test_seed_order_noise_and_checkpointing_become_keys_of_hydra(settings, section, wanted, note):
    notes = []
    hydra = map_arguments(
        arguments(**settings), HydraConfig.parse({**SECTION, **section}), notes.append
    )
    assert hydra == HydraConfig.parse({**SECTION, **wanted})
    assert [note in said for said in notes[:1]] == [True] * (note is not None)


def test_a_model_in_16_bit_stays_there_or_the_user_hears_of_it():
    notes = []
    model = tiny("llama")
    check_dtype(model.half(), torch.float16, notes.append)
    check_dtype(model.float(), torch.bfloat16, notes.append)
    check_dtype(model, torch.float32, notes.append)
    assert not notes
    with pytest.raises(
        HydraConfigError, match=r"loaded in torch\.float16 .* set fp16=True, or load"
    ):
        check_dtype(model.half(), torch.float32, notes.append)
    check_dtype(model.bfloat16(), torch.float32, notes.append)
    assert "trained and saved in torch.bfloat16" in notes[0]


def test_batch_sizes_that_differ_from_the_json_are_no_mismatch():
    class Config:
        mismatches = (
            "- ds train_batch_size=3 vs hf train_batch_size (calculated)=8",
            "- ds train_micro_batch_size_per_gpu=1 vs hf per_device_train_batch_size=8",
            "- ds gradient_clipping=1.0 vs hf max_grad_norm=2.0",
        )

    config = Config()
    drop_batch_size_mismatches(config)
    assert config.mismatches == [Config.mismatches[2]]


def test_collators_that_only_pad_are_accepted():
    notes = []
    tokenizer = object()
    check_data_collator(transformers.default_data_collator, notes.append)
    check_data_collator(transformers.DataCollatorWithPadding(tokenizer), notes.append)
    assert not notes
    tokenizer = type("Tokenizer", (), {"pad_token": "x", "mask_token": None})()
    check_data_collator(
        transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False), notes.append
    )
    (note,) = notes
    assert "labels are those of the dataset, else all tokens, those included that pad" in note


def my_collator(examples):
    return examples


def bare_trainer(kind=HydraTrainer):
    trainer = object.__new__(kind)
    trainer.compute_loss_func = trainer.label_smoother = trainer.optimizer_cls_and_kwargs = None
    return trainer


def with_loss():
    trainer = bare_trainer()
    trainer.compute_loss_func = print
    return trainer


def masking_collator(kind, **options):
    """As TRL's former DataCollatorForCompletionOnlyLM, which masks prompts."""
    tokenizer = type("Tokenizer", (), {"pad_token": "x", "mask_token": None})()
    return type("MasksPrompts", (kind,), {"__module__": "users_code"})(tokenizer, **options)


def mapped(settings, **section):
    return map_arguments(arguments(**settings), HydraConfig.parse({**SECTION, **section}), print)


BY_NAME = r"model is 'gpt2', .*AutoModelForCausalLM\.from_pretrained\('gpt2'\)"
MASKS = r"data_collator is MasksPrompts, but .*dataset"
REFUSED = [
    (
        lambda: check_arguments(
            SFTConfig("unused", use_cpu=True, report_to="none", bf16=False), print
        ),
        r"SFTConfig is a configuration of TRL.*ds_hydra\.trl",
    ),
    (lambda: HydraTrainer("gpt2"), BY_NAME),
    (lambda: ds_hydra.initialize(model="gpt2", config=SMALLEST), BY_NAME),
    (lambda: HydraTrainer(nn.Linear(1, 1), arguments()), "needs DeepSpeed: pass TrainingArguments"),
    (
        lambda: bare_trainer().training_step(nn.Linear(1, 1), {"input_ids": torch.ones(1, 2)}),
        r"has got inputs; engine\.train_batch\(batch",
    ),
    (lambda: check_overrides(with_loss(), others=find_set(with_loss())), "_func is <built-in func"),
    (
        lambda: mapped({"data_seed": 2}, seed=1),
        r"hydra\.seed is 1, TrainingArguments\.data_seed asks for 2",
    ),
    (
        lambda: mapped({"train_sampling_strategy": "sequential"}, shuffle=True),
        r"hydra\.shuffle is True",
    ),
    (
        lambda: mapped({"activation_checkpointing": True}, activation_checkpointing=False),
        "remove one of them",
    ),
    (lambda: mapped({"full_determinism": True}, deterministic=False), "deterministic is False"),
    (
        lambda: mapped({"neftune_noise_alpha": -1.0}),
        r"neftune_noise_alpha sets hydra\.neftune_noise_alpha is -1\.0",
    ),
    (
        lambda: check_data_collator(my_collator, print),
        r"data_collator is my_collator, but .*completion_mask",
    ),
    (
        lambda: check_data_collator(masking_collator(transformers.DataCollatorForSeq2Seq), print),
        MASKS,
    ),
    (
        lambda: check_data_collator(
            masking_collator(transformers.DataCollatorForLanguageModeling, mlm=False), print
        ),
        MASKS,
    ),
]


@pytest.mark.parametrize(("ask", "said"), REFUSED)
def test_what_would_train_otherwise_than_it_says_is_refused(ask, said):
    with pytest.raises(HydraConfigError, match=said):
        ask()


def test_methods_that_are_set_on_a_trainer_or_on_transformers_are_refused(monkeypatch):
    check_overrides(bare_trainer())
    match = r"overrides what would not be used:\s+_prepare_inputs\(\): "
    trainer = bare_trainer()
    trainer._prepare_inputs = print
    with pytest.raises(HydraConfigError, match=match):
        check_overrides(trainer)
    monkeypatch.setattr(transformers.Trainer, "_prepare_inputs", print)
    with pytest.raises(HydraConfigError, match=match):
        check_overrides(bare_trainer())


def test_methods_of_a_base_that_stands_behind_are_refused():
    class Behind(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

        def _save_checkpoint(self, *args):
            super()._save_checkpoint(*args)

        def log(self, *args):
            super().log(*args)

    class Mixed(HydraTrainer, Behind):
        pass

    class Before(Behind, HydraTrainer):
        pass

    with pytest.raises(HydraConfigError) as raised:
        check_overrides(bare_trainer(Mixed))
    first, loss, save = str(raised.value).splitlines()
    assert first == "Mixed overrides what would not be used:"
    assert loss.startswith("  compute_loss(): the loss is computed inside the last pipeline stage")
    assert save == (
        "  _save_checkpoint() of Behind: EngineMixin stands before it among the bases and does this itself; override "
        "it in Mixed, and call super()"
    )

    class Generates(HydraTrainer, transformers.Seq2SeqTrainer):
        pass

    assert is_overridden(bare_trainer(Generates), "prediction_step")
    assert not is_overridden(bare_trainer(), "prediction_step")
    with pytest.raises(HydraConfigError) as raised:
        check_overrides(bare_trainer(Before))
    assert str(raised.value).splitlines()[1:] == [loss]


@pytest.mark.parametrize(
    ("section", "attributes", "words"),
    [
        ("optimizer", {"create_optimizer": print}, r"create_optimizer\(\) of its own"),
        ("optimizer", {"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, "_cls_and_kwargs of its"),
        ("scheduler", {"create_scheduler": print}, r"create_scheduler\(\) of its own"),
    ],
)  # fmt: skip
def test_what_makes_an_optimizer_or_a_schedule_beside_the_json_is_refused(
    section, attributes, words
):
    trainer = bare_trainer()
    trainer.optimizer = trainer.lr_scheduler = None
    trainer._of_engine = (None, None)
    vars(trainer).update(attributes)
    for sections in ({}, {section: {"type": "AdamW"}}):
        trainer.args = arguments(deepspeed={**SMALLEST, **sections})
        with pytest.raises(HydraConfigError, match=words) if sections else contextlib.nullcontext():
            trainer._refuse_optimizers()


def test_a_method_that_calls_the_one_of_transformers_is_not_refused_beside_the_json():
    class Logs(HydraTrainer):
        def create_optimizer(self, model=None):
            return super().create_optimizer(model)

    trainer = bare_trainer(Logs)
    trainer.optimizer = trainer.lr_scheduler = None
    trainer._of_engine, notes = (None, None), []
    trainer.args = arguments(deepspeed={**SMALLEST, "optimizer": {"type": "AdamW"}})
    trainer._refuse_optimizers(notes.append)
    assert "Logs has create_optimizer() of its own" in notes[0]


def test_a_seed_that_is_set_after_the_start_orders_the_data(monkeypatch):
    monkeypatch.setattr(transformers.Trainer, "train", lambda self, *args: self.hydra_config)
    trainer = bare_trainer()
    trainer.args, trainer.data_collator = arguments(), transformers.default_data_collator
    trainer._hydra_section, trainer._of_engine = HYDRA, (None, None)
    trainer.deepspeed = trainer.optimizer = trainer.lr_scheduler = None
    assert trainer.train() == HYDRA
    trainer.args.seed = 7
    trainer.args.train_sampling_strategy = "sequential"
    assert trainer.train() == HYDRA.model_copy(update={"seed": 7, "shuffle": False})


@pytest.fixture
def alone():
    """This process as the one rank of a job."""
    if dist.is_initialized():  # as TrainingArguments of another test have left it
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_sampler_gives_rows_and_order():
    device = torch.device("cpu")
    assert draw_rows([5, 2, 2], 6, device) == ([5, 2, 2], True)
    assert draw_rows(SubsetRandomSampler(range(3, 30)), 30, device) == ([*range(3, 30)], False)
    state = torch.get_rng_state()
    with pytest.raises(HydraConfigError, match=r"RandomSampler .* draws other rows each time"):
        draw_rows(RandomSampler(range(99), num_samples=9), 99, device)
    assert torch.equal(torch.get_rng_state(), state)
    for sampler, message in (
        (BatchSampler(range(4), 2, False), r"draws \[0, 1\], expected rows .* 0 to 3"),
        ([0, 4], r"draws 4, expected rows .* 0 to 3"),
        ([], "draws nothing"),
        (iter([0]), "has no length"),
    ):
        with pytest.raises(HydraConfigError, match=message):
            draw_rows(sampler, 4, device)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("training_step", None),
        ("evaluation_loop", None),
        ("log", None),
        ("_finalize_training", None),
        ("_run_epoch", ["epoch", "steps_in_epoch", "num_update_steps_per_epoch"]),
        ("_prepare_for_training", ["max_steps", "train_dataloader", "resume_from_checkpoint"]),
        ("_init_training_state", ["max_steps", "num_update_steps_per_epoch"]),
    ],
)
def test_overrides_have_the_signatures_of_transformers(name, wanted):
    """An upgrade of transformers that renames what HydraTrainer overrides breaks here and not in a
    run. `wanted`: what of the parent's arguments is used, None for the same arguments.
    """
    theirs, own = getattr(transformers.Trainer, name), getattr(HydraTrainer, name)
    assert own is not theirs
    theirs = list(inspect.signature(theirs).parameters)
    if wanted is None:
        assert list(inspect.signature(own).parameters) == theirs
    else:
        assert [key for key in theirs if key in wanted] == wanted


def test_a_checkpoint_of_transformers_is_written_by_the_calls_that_it_makes():
    """`_save_checkpoint` is written anew, to write aside: what transformers adds breaks here."""
    ours: set[str] = set()
    for name in ("_save_checkpoint", "_write_checkpoint", "_note_callbacks"):
        ours |= set(getattr(HydraTrainer, name).__code__.co_names)
    theirs = set(transformers.Trainer._save_checkpoint.__code__.co_names)
    other_hardware = {
        "is_torch_xla_available", "xm", "rendezvous", "smp", "is_sagemaker_mp_enabled",
    }  # fmt: skip
    replaced = {"ParallelMode", "DISTRIBUTED", "parallel_mode", "dist", "barrier", "SaveStrategy"}
    replaced |= {"STEPS", "EPOCH", "BEST", "save_strategy", "hp_search_backend"}
    spelled = {"__class__", "__name__"}
    assert theirs - ours <= other_hardware | replaced | spelled


def epochs_of(lengths, budget, limit=0):
    sampler = TokenBudgetSampler(lengths, np.maximum(np.asarray(lengths) - 1, 0), budget, seed=1)
    return Epochs(sampler, len(lengths), limit=limit), sampler


@given(st.lists(st.integers(2, 9), min_size=1, max_size=20), st.integers(1, 40), st.integers(1, 3))
def test_epochs_end_where_the_sampler_does(lengths, budget, num_epochs):
    epochs, sampler = epochs_of(lengths, budget)
    total = epochs.iterations_until(num_epochs)
    counts = [epochs.num_iterations(epoch) for epoch in range(num_epochs)]
    assert sum(counts) == total
    assert min(counts) >= 1
    drawn = [next(sampler) for _ in range(total)]
    num_sequences = sum(len(batch.sample_indices) for batch in drawn)
    assert num_sequences >= num_epochs * len(lengths), "not every sequence was drawn in every epoch"
    if max(counts) > 1:  # without the last batch, something of the last epoch would be missing
        before_last = num_sequences - len(drawn[-1].sample_indices)
        assert before_last < num_epochs * len(lengths) or counts[-1] == 1
    for iteration in range(total):
        epoch, into = epochs.find(iteration)
        assert sum(counts[:epoch]) + into == iteration
        assert 0 <= into < counts[epoch]
    assert epochs.num_epochs(total) == num_epochs
    for max_steps, wanted in ((-1, total), (0, 0), (7, 7)):
        assert epochs.training_values(max_steps, num_epochs)[-1] == wanted


def test_half_an_epoch_and_a_limit():
    epochs, _ = epochs_of([4] * 100, 8)
    assert epochs.num_iterations(0) == 50
    assert epochs.iterations_until(1.5) == 75
    limited, _ = epochs_of([4] * 100, 8, limit=10)
    assert limited.num_iterations(0) == 50  # extrapolated from 10
    assert limited.find(10) == (0, 10)


def test_an_epoch_of_a_small_dataset_is_one_iteration():
    """Three epochs of 4 rows are 12 sequences, whatever else an iteration could hold."""
    lengths = [16] * 4
    epochs, sampler = epochs_of(lengths, budget_of(lengths, 1280))
    assert epochs.iterations_until(3) == 3
    assert [sorted(next(sampler).sample_indices) for _ in range(3)] == [[0, 1, 2, 3]] * 3
    assert budget_of(lengths, 48) == 48


@pytest.mark.parametrize(
    ("metric", "greater", "wanted"),
    [("eval_perplexity", None, False), ("perplexity", True, False), ("eval_loss", None, False),
     ("accuracy", None, True), (None, None, None)],
)  # fmt: skip
def test_the_least_perplexity_is_the_best(metric, greater, wanted):
    args = arguments(metric_for_best_model=metric, greater_is_better=greater)
    notes = []
    correct_best_metric(args, notes.append)
    assert args.greater_is_better is wanted
    assert len(notes) == bool(metric and "perplexity" in metric)


FIRST = {"input_ids": [1, 2, 3]}
COLUMNS = {"input_ids": [[1, 2], [3, 4]]}


class Computed(torch.utils.data.Dataset):
    """`row(index, number)` of each row that is read, the `number`-th one."""

    def __init__(self, row, length=2):
        self.row, self.length, self.number = row, length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.number += 1
        return self.row(index, self.number)


def crop(begin):
    tokens = torch.arange(begin, begin + 3)
    return {"input_ids": tokens, "labels": tokens}


def with_column(column, without):
    return [FIRST | ({column: [1, 1, 1]} if row != without else {}) for row in range(3)]


OF_ALL_ROWS = ("labels", "attention_mask", "completion_mask", "assistant_masks")
PART = Subset(datasets.Dataset.from_list([FIRST] * 4).with_transform(lambda rows: rows), [0, 2])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        *((with_column(c, row), f"row {row} of rows has no '{c}', and others") for c in OF_ALL_ROWS for row in (0, 1)),
        *(
            ([FIRST, row], f"row 1 of rows is a {type(row).__name__}, expected a dict")
            for row in ((1, 2), [1, 2], "text", torch.ones(3))
        ),
        (torch.utils.data.DataLoader([FIRST]), r"rows is a .*; pass .*loader\.dataset"),
        (COLUMNS, "rows is a dict; pass .*from_dict"),
        (pandas.DataFrame(COLUMNS), "rows is a DataFrame; pass .*from_pandas"),
        (datasets.Dataset.from_dict(COLUMNS).data.table, r"rows is a .*; pass .*datasets\.Dataset\("),
        ((row for row in [FIRST]), r"rows is a generator.*IterableDataset\.from_generator"),
        (
            Computed(lambda index, _: FIRST if index < 2 else {}["gone"], length=3),
            "row 2 of rows cannot be read: KeyError",
        ),
        (Computed(lambda _, number: crop(number)), "rows is a Computed whose row 0 is another"),
        (Computed(lambda index, number: {"input_ids": torch.arange(3) + index * number}), "whose row 1 is another"),
        (Computed(lambda _, number: {"text": f"text {number}"}), "whose row 0 is another"),
        (PART, "computes its rows when they are read"),
        (torch.utils.data.ConcatDataset([PART, PART]), "computes its rows when they are read"),
    ],
)  # fmt: skip
def test_what_has_no_rows_of_known_lengths_is_refused(rows, words):
    with pytest.raises((HydraConfigError, HydraDataError), match=words):
        as_datasets(rows, "rows")


def test_rows_of_lists_and_of_datasets_that_give_the_same_each_time_are_read():
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3]}]
    assert as_datasets(rows, "train_dataset")["input_ids"][:] == [[1, 2], [3]]
    texts = [{"text": "a"}, {"text": "b", "tags": ["t"]}]  # columns that few rows have
    assert as_datasets(texts, "train_dataset")["tags"][:] == [None, ["t"]]
    same = Computed(lambda _, number: {**crop(0), "seen": number})
    assert as_datasets(same, "train_dataset")["input_ids"][:] == [[0, 1, 2]] * 2
    assert len(as_datasets(Computed(lambda *_: {"text": "text"}), "train_dataset")) == 2


@pytest.mark.parametrize("stops", [False, True])
def test_an_epoch_that_a_callback_stops_does_not_skip_data_in_silence(monkeypatch, caplog, stops):
    monkeypatch.setattr(transformers.Trainer, "_run_epoch", lambda self, **settings: None)
    trainer = object.__new__(HydraTrainer)
    trainer._epochs = SimpleNamespace(num_iterations=lambda epoch: 3)
    trainer.control = transformers.TrainerControl(should_epoch_stop=stops)
    say_once.cache_clear()
    trainer._run_epoch(epoch=0)
    assert ("global batches go on where those of this one stopped" in caplog.text) == stops


@pytest.fixture
def reader(alone):
    args = SimpleNamespace(
        process_index=0,
        device=torch.device("cpu"),
    )
    return DatasetReader(
        args,
        HydraConfig.parse({**SECTION, "context_length": 4}),
        logging.getLogger(__name__).warning,
    )


def test_rows_that_were_changed_in_place_are_read_anew(reader):
    rows = [{"input_ids": [1] * length} for length in (2, 3)]
    before = reader.read(rows, "eval_dataset", None)
    assert reader.read(list(rows), "eval_dataset", None) is before
    rows[0] = {"input_ids": [2, 2, 2]}
    after = reader.read(rows, "eval_dataset", None)
    assert [tokens.lengths.tolist() for tokens in (before, after)] == [[2, 3], [3, 3]]
    for number in range(20):
        reader.read([{"input_ids": [number, number]}], "eval_dataset", None)
    assert len(reader._tokens_of) == 22


def test_another_tokenizer_reads_anew_and_of_a_processor_its_own(reader):
    class Tokenizer:
        def __init__(self, first):
            self.first = first

        def __call__(self, texts, **_):
            return {"input_ids": [[self.first, len(text)] for text in texts]}

    one, other = Tokenizer(1), Tokenizer(2)
    rows = [{"text": "abc"}]
    tokens = [reader.read(rows, "eval_dataset", t)[0]["input_ids"][0] for t in (one, other, one)]
    assert tokens == [1, 2, 1]
    processor = object.__new__(transformers.ProcessorMixin)  # called with texts it takes images
    processor.tokenizer = make_tokenizer()
    read = [reader.read([{"text": "ab"}], "train_dataset", processor) for _ in range(2)]
    assert processor.tokenizer.decode(read[0][0]["input_ids"]) == "ab<eos>"
    assert read[0] is read[1]


def test_errors_of_reading_say_which_dataset_it_is(reader):
    with pytest.raises(HydraConfigError, match=r"^eval_dataset\['b'\]: "):
        reader.read([{"input_ids": [1]}], "eval_dataset['b']", None)


@pytest.mark.parametrize("every_row", [False, True])
def test_rows_that_are_cut_or_left_out_are_said(reader, caplog, every_row):
    rows = [{"input_ids": [1] * length} for length in (6, 1, 3)]
    read = [reader.read(rows, name, None, every_row=every_row) for name in ("a", "b")]
    assert read[0] is read[1]
    assert read[0].lengths.tolist() == ([6, 1, 3] if every_row else [4, 3])
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    wanted = ["1 truncated to 4 tokens", "1 left out, without a token to predict"]
    assert len(said) == (0 if every_row else 1)
    assert all(text in said[0] for text in wanted if said)


def test_a_length_that_is_set_after_the_start_cuts_rows(reader):
    trainer = bare_trainer()
    trainer._reader, trainer.processing_class, found = reader, None, []
    trainer.args, trainer.deepspeed = reader._args, None
    for longest in (4, 3):
        trainer.hydra_config = HydraConfig.parse({**SECTION, "context_length": longest})
        found += trainer._read([{"input_ids": [1, 2, 3, 4, 5]}], "rows").lengths.tolist()
    assert found == [4, 3]


def test_batches_of_evaluation_look_like_those_of_any_loader(reader):
    tokens = reader.read([{"input_ids": ids} for ids in ([1, 2], [3, 4, 5], [6, 7])], "rows", None)
    batches = EvalBatches(tokens, 5, lambda examples: pad_examples(examples, 0))
    first, second = batches
    assert first["input_ids"].tolist() == [[1, 2, 0], [3, 4, 5]]
    assert first["labels"].tolist() == [[1, 2, -100], [3, 4, 5]]
    assert second["attention_mask"].tolist() == [[1, 1]]
    assert [count for _, count in batches.examples()] == [3, 1]
    empty = dict.fromkeys(("input_ids", "labels"), np.array([], dtype=np.int64))
    assert pad_examples([empty], pad_token_id=9)["input_ids"].tolist() == [[9]]


def test_the_progress_bar_shows_the_strategy(monkeypatch):
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=len, flush=int))  # as trackers' own
    known = {"strategy": "1x<2,1> + 2x<1,1>", "tokens_per_s": 4971.0, "loss": 6.5}
    flops = [{"tflops_per_device": value, "mfu": float("nan")} for value in (float("nan"), 412.0)]
    metrics = [None, *(SimpleNamespace(**known, **each) for each in flops)]
    callback = StrategyProgressCallback(lambda: metrics[0])
    state = SimpleNamespace(is_world_process_zero=True, max_steps=3, global_step=1)
    callback.on_train_begin(None, state, None)
    callback.on_prediction_step(None, state, None, eval_dataloader=[])
    callback.on_step_end(None, state, None)
    assert not callback.training_bar.postfix
    metrics.pop(0)
    callback.on_step_end(None, state, None)
    assert callback.training_bar.postfix == "1x<2,1> + 2x<1,1> | 4,971 tokens/s | loss 6.500"
    metrics.pop(0)
    callback.on_step_end(None, state, None)
    assert "412 TFLOP/s" in callback.training_bar.postfix
    callback.on_train_end(None, state, None)


@pytest.mark.parametrize(
    "sections",
    [
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        {"gradient_clipping": "auto"},
        {"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"},
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
    ],
    ids=str,
)
def test_auto_is_refused_by_key_where_no_trainer_fills_it_in(sections):
    config = {**SMALLEST, **sections}
    with pytest.raises(HydraConfigError, match=r'"auto" is what the Trainer fills in') as caught:
        ds_hydra.initialize(model=torch.nn.Linear(1, 1), config=config)
    document, _ = read_ds_config(config)
    keys = str(caught.value).split(": ")[0].split(", ")
    for key in keys:  # as advised
        *path, last = key.split(".")
        section = document
        for name in path:
            section = section[name]
        del section[last]
    refuse_auto(document)
    refuse_auto({"pipeline": {"stages": "auto"}, "bf16": {"keep_in_fp32_modules": "auto"}})


def test_a_collator_that_is_not_called_is_named_and_a_sampler_refused(caplog):
    given = {"data_sampler": range(3), "collate_fn": print, "route": "train"}
    with pytest.raises(HydraConfigError, match="data_sampler is a range"):
        ds_hydra.HydraEngine.deepspeed_io(None, [], **given)
    assert "collate_fn is print and not called" in caplog.text


def test_a_start_without_a_launcher_says_how_to_start(monkeypatch):
    for module, kind, said in (
        ("mpi4py", HydraConfigError, "torchrun --nproc-per-node N"),
        ("other", ModuleNotFoundError, ""),
    ):
        with pytest.raises(kind, match=said), hydra_engine_class(HYDRA):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(HydraConfigError, match="torchrun --nproc-per-node N"):
        HydraTrainer._begin_reading(None, "train_dataset")


def test_schedules_that_want_a_metric_are_known_by_their_step():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedules = torch.optim.lr_scheduler
    assert needs_metric(schedules.ReduceLROnPlateau(optimizer))
    assert needs_metric(transformers.optimization.GreedyLR(optimizer))
    for own in (schedules.ConstantLR(optimizer), WarmupLR(optimizer), None):
        assert not needs_metric(own)


def test_a_checkpoint_of_weights_alone_is_not_resumed_from_and_says_what_to_do(tmp_path):
    trainer = SimpleNamespace(
        engine=SimpleNamespace(load_checkpoint=lambda *_, **__: (None, {})),
        model=nn.Linear(1, 1),
        args=SimpleNamespace(ignore_data_skip=False),
    )
    with pytest.raises(HydraConfigError, match="save_only_model=True saves weights alone"):
        EngineMixin._load_engine(trainer, str(tmp_path))


def test_a_checkpoint_that_is_mixed_of_two_is_announced(tmp_path):
    warnings = []
    trainer = SimpleNamespace(
        engine=SimpleNamespace(load_checkpoint=lambda *_, **__: ("found", {}), global_steps=4),
        model=nn.Linear(1, 1),
        args=SimpleNamespace(ignore_data_skip=False),
        _warn=warnings.append,
    )
    for step in (4, 3):
        (tmp_path / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        EngineMixin._load_engine(trainer, str(tmp_path))
    assert not warnings, "another program may count its steps otherwise"
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step4" / MANIFEST_NAME).touch()
    EngineMixin._load_engine(trainer, str(tmp_path))
    (warning,) = warnings
    assert "is of step 3, its weights and optimizer are of step 4" in warning
