"""TRL's trainers with and without HydraMixin: the same script, the same log."""

from __future__ import annotations

import json
import math
from pathlib import Path

import datasets
import deepspeed
import pytest
import torch
import transformers
import trl
from as_stock import assert_as_stock
from distributed import run_distributed
from engines import ds_config, small_profile
from models import tiny
from trl_runs import (
    GENERATIONS,
    NUM_TOKENS,
    PER_STEP,
    STEPS,
    arguments,
    chats,
    make_tokenizer,
    pairs,
    prompts,
    rollouts,
    save_model,
    share_of_a,
    texts,
    texts_of_one_length,
    without_times,
)

from ds_hydra.trl import HydraDPOTrainer, HydraGRPOTrainer, HydraMixin, HydraSFTTrainer

REWARDS = {"rewards/chosen", "rewards/rejected", "rewards/margins"}
SMALL = {*REWARDS, "logits/chosen", "logits/rejected"}
"""Differences of log-probabilities and means of logits of both signs, which cancel."""


def lora(**settings):
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, **settings)


def other_model():
    return tiny("llama", seed=5, vocab_size=NUM_TOKENS, max_position_embeddings=512)


def policy():
    return {
        "reward_funcs": share_of_a,
        "rollout_func": rollouts,
        "processing_class": make_tokenizer(),
    }


def judged():
    """Rewards of a function, and of a model that has no head over tokens."""
    return policy() | {"reward_funcs": [share_of_a, "judge"]}


def save_judge(folder):
    torch.manual_seed(7)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": NUM_TOKENS, "num_labels": 1}
    judge = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes))
    judge.save_pretrained(f"{folder}/judge")
    make_tokenizer().save_pretrained(f"{folder}/judge")


POLICY = {"num_generations": GENERATIONS, "max_completion_length": 100}
CASES = {
    "plain": {"data": texts},
    "chat": {"data": chats, "arguments": {"assistant_only_loss": True}},
    "lora": {
        "data": chats,
        "arguments": {"learning_rate": 1e-2, "gradient_accumulation_steps": 2, "max_steps": 5},
        "more": lambda: {"peft_config": lora()},
    },
    "lora and tables": {
        "data": texts,
        "arguments": {"max_steps": 4},
        "more": lambda: {"peft_config": lora(modules_to_save=["embed_tokens", "lm_head"])},
    },
    "experts": {
        "family": "qwen3_moe",
        "data": texts,
        "arguments": {"router_aux_loss_coef": 0.0, "max_steps": 4},
    },
    "dpo": {"data": pairs},
    "dpo lora": {
        "data": pairs,
        "arguments": {"learning_rate": 1e-2, "gradient_accumulation_steps": 2, "max_steps": 5},
        "more": lambda: {"peft_config": lora()},
    },
    "smoothed stream": {
        "data": lambda: texts().to_iterable_dataset(),
        "arguments": {"label_smoothing_factor": 0.1, "max_steps": 3},
    },
    "dft, flattened": {
        "data": texts,
        "arguments": {"loss_type": "dft", "padding_free": True, "max_length": None, "max_steps": 3},
    },
    "packed": {"data": texts, "arguments": {"packing": True, "max_steps": 2}},
    "evaluated": {
        "data": texts,
        "arguments": {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4},
        "more": lambda: {"eval_dataset": texts_of_one_length()},
    },
    "grpo": {
        "data": prompts,
        "arguments": {**POLICY, "beta": 0.05, "num_iterations": 2, "max_steps": 4},
        "more": judged,
    },
    "grpo accumulated": {
        "data": prompts,
        "arguments": {
            **POLICY,
            "gradient_accumulation_steps": 2,
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "max_steps": 3,
        },
        "more": policy,
    },
    "grpo entropy": {
        "data": prompts,
        "arguments": {
            **POLICY,
            "loss_type": "dr_grpo",
            "entropy_coef": 0.01,
            "temperature": 0.7,
            "beta": 0.05,
            "max_steps": 3,
        },
        "more": policy,
    },
    "grpo adaptive": {
        "data": prompts,
        "arguments": {
            **POLICY,
            "gradient_accumulation_steps": 2,
            "use_adaptive_entropy": True,
            "entropy_target": 20.0,
            "entropy_coef_delta": 0.01,
            "max_steps": 3,
        },
        "more": policy,
    },
    "dpo synced": {
        "data": pairs,
        "arguments": {
            "sync_ref_model": True,
            "ref_model_sync_steps": 2,
            "learning_rate": 1e-2,
            "max_steps": 5,
        },
    },
    "dpo mix": {
        "data": pairs,
        "arguments": {"loss_type": ["ipo", "apo_zero", "sft"], "ld_alpha": 0.5, "max_steps": 4},
        "more": lambda: {"ref_model": other_model()},
    },
    "dpo before": {
        "data": pairs,
        "arguments": {
            "precompute_ref_log_probs": True,
            "loss_type": "robust",
            "label_smoothing": 0.2,
            "f_divergence_type": "js_divergence",
            "max_steps": 4,
        },
    },
}
BY_RANK = ("grpo accumulated", "grpo entropy", "grpo adaptive", "dpo mix")
"""Cases with means over what a rank has, which TRL averages over ranks: others on one rank."""
USUAL = ("plain", "chat", "lora", "dpo", "dpo lora", "grpo")


def make(name, kind, folder, world):
    """The trainer of a case: the script is the same for both kinds."""
    deepspeed.utils.logger.setLevel("ERROR")
    transformers.logging.set_verbosity_error()
    case, of = CASES[name], name[:4].strip()
    hydra, stock, arguments_class = {
        "dpo": (HydraDPOTrainer, trl.DPOTrainer, trl.DPOConfig),
        "grpo": (HydraGRPOTrainer, trl.GRPOTrainer, trl.GRPOConfig),
    }.get(of, (HydraSFTTrainer, trl.SFTTrainer, trl.SFTConfig))
    settings = case.get("arguments", {})
    accumulated = settings.get("gradient_accumulation_steps", 1)
    settings = arguments(f"{folder}/{kind}-{name}", world * accumulated, **settings)
    settings["per_device_eval_batch_size"] = PER_STEP // world
    if kind == "hydra" and name not in ("plain", "experts"):
        settings["deepspeed"] = config(folder)
    if of == "grpo":
        del settings["max_length"]
    more = case.get("more", dict)()
    if more.get("reward_funcs") == [share_of_a, "judge"]:
        more["reward_funcs"] = [share_of_a, f"{folder}/judge"]
    return (stock if kind == "stock" else hydra)(
        model=f"{folder}/{case.get('family', 'model')}",
        args=arguments_class(**settings),
        train_dataset=case["data"](),
        **more,
    )


def config(folder):
    """A configuration with several strategies, and no profile to measure."""
    hydra = {"profile": f"{folder}/profile.json", "context_length": 128}
    return ds_config(hydra=hydra, gradient_clipping="auto", train_micro_batch_size_per_gpu="auto")


def histories(kind, folder, world, names):
    found = {}
    for name in names:
        trainer = make(name, kind, folder, world)
        trainer.train()
        found[name] = without_times(trainer.state.log_history)
        if kind == "hydra":
            trainer.engine.destroy()
    return found


def prepare(folder, families=("llama",)):
    for family in families:
        save_model(folder, family)
    save_judge(folder)
    profile = small_profile(6_000_000, num_layers=4)
    Path(folder, "profile.json").write_text(json.dumps(profile))


def both(folder, world, names):
    prepare(folder, {CASES[name].get("family", "llama") for name in names})
    stock = run_distributed(histories, 1, "stock", str(folder), 1, names)[0]
    return stock, run_distributed(histories, world, "hydra", str(folder), world, names)[0]


def compare(stock, hydra):
    """Every number of every entry of the log: losses, norms, accuracies, entropies, rewards."""
    for wanted, found in zip(stock, hydra, strict=True):
        if all(abs(wanted[key]) < 1e-4 for key in REWARDS & wanted.keys()):
            for entry in (wanted, found):  # the policy is the reference still
                entry.pop("rewards/accuracies", None)
        assert_as_stock(found, wanted, 1e-4, absolute=dict.fromkeys(SMALL, 1e-4))


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return both(tmp_path_factory.mktemp("trl"), 2, USUAL)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", USUAL)
def test_two_ranks_log_what_trl_logs_on_one(on_two_ranks, name):
    stock, hydra = on_two_ranks
    losses = [entry["loss"] for entry in stock[name] if "loss" in entry]
    assert len(losses) == CASES[name].get("arguments", {}).get("max_steps", STEPS)
    compare(stock[name], hydra[name])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(2, tuple(n for n in CASES if n not in USUAL), marks=pytest.mark.nightly),
        pytest.param(4, tuple(CASES), marks=pytest.mark.nightly),
    ],
    ids=("others on two ranks", "all on four ranks"),
)
def test_ranks_log_what_trl_logs(tmp_path, world, names):
    stock, hydra = both(tmp_path, world, names)
    stock |= run_distributed(histories, world, "stock", str(tmp_path), world, BY_RANK)[0]
    for name in names:
        compare(stock[name], hydra[name])


def behaviours(folder):
    """A subclass with a loader, an order and a loss of its own; runs that go on; mistakes."""
    make("plain", "hydra", folder, 2)  # quiet loggers
    model, tokenizer = f"{folder}/model", make_tokenizer()

    class Mine(HydraMixin, trl.SFTTrainer):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(range(PER_STEP))

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs, fused_lm_head=True)
            self.seen.extend(inputs["input_ids"][:, 0].tolist())
            return outputs.log_probs.exp().sum() - 0.1 * outputs.entropy.square().sum()

    def start(kind=Mine, data=None, name="own", **settings):
        of_policy = kind is HydraGRPOTrainer
        arguments_class = {HydraDPOTrainer: trl.DPOConfig, HydraGRPOTrainer: trl.GRPOConfig}
        settings = arguments(f"{folder}/{name}", 2, deepspeed=config(folder), **settings)
        if of_policy:
            del settings["max_length"]
        more = {"reward_funcs": lambda completions, **_: [1.0] * len(completions)}
        trainer = kind(
            model=model,
            args=arguments_class.get(kind, trl.SFTConfig)(**settings),
            train_dataset=texts() if data is None else data,
            processing_class=tokenizer,
            **({**more, "rollout_func": rollouts} if of_policy else {}),
        )
        trainer.seen = []
        return trainer

    def train(trainer, **given):
        trainer.train(**given)
        trainer.engine.destroy()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def error_of(trainer):
        try:
            trainer.train()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            trainer.engine.destroy()

    found = {}
    own = start(max_steps=2, gradient_checkpointing=False)
    found["own"] = train(own), own.seen
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "name": "resumed"}
    found["whole"] = train(start(HydraSFTTrainer, **settings))
    found["resumed"] = train(
        start(HydraSFTTrainer, **settings), resume_from_checkpoint=f"{folder}/resumed/checkpoint-2"
    )
    card = Path(folder, "resumed", "README.md").read_text()
    found["card"] = "library_name: transformers" in card
    unlabelled = {"input_ids": [5, 6, 7, 8], "labels": [-100] * 4}
    labelled = {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]}
    single = {"input_ids": [5], "labels": [5]}
    rows = [single, unlabelled] * PER_STEP + [unlabelled, labelled] * (PER_STEP // 2)
    rows[:PER_STEP] = [single] * PER_STEP  # a step without any sequence
    found["unlabelled"] = train(
        start(
            HydraSFTTrainer,
            datasets.Dataset.from_list(rows),
            max_steps=3,
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
        )
    )
    equal = start(HydraGRPOTrainer, prompts(), **POLICY, max_steps=2)
    found["equal rewards"] = train(equal)
    norms = [e["grad_norm"] for e in equal.state.log_history if "grad_norm" in e]
    found["norms"] = norms
    before = {"precompute_ref_log_probs": True, "learning_rate": 1e-2, "max_steps": 2}
    twice = start(HydraDPOTrainer, pairs(), **before)
    twice.train()
    found["twice"] = train(twice)
    entropy = {"use_adaptive_entropy": True, "entropy_target": 20.0, "entropy_coef_delta": 0.01}
    settings |= {"name": "adaptive", "gradient_accumulation_steps": 2, **POLICY, **entropy}
    adaptive = start(HydraGRPOTrainer, prompts(), **settings)
    train(adaptive)
    found["coefficients"] = [
        e["entropy_coef"] for e in adaptive.state.log_history if "entropy_coef" in e
    ]
    state = Path(folder, "adaptive", "checkpoint-4", "entropy_ctrl_state.json")
    found["adaptive"] = json.loads(state.read_text())["entropy_coef"]
    long = [{"prompt": "a" * 100, "chosen": "b" * 80, "rejected": "c"}] * PER_STEP
    long = datasets.Dataset.from_list(long)
    found["long"] = error_of(start(HydraDPOTrainer, long, max_length=None, max_steps=1))
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_subclasses_resumed_runs_and_mistakes(tmp_path):
    prepare(tmp_path)
    results = run_distributed(behaviours, 2, str(tmp_path))
    found = results[0]
    losses, seen = found["own"]
    assert losses[1] < losses[0]
    first = [tokens[0] for tokens in make_tokenizer()(list(texts()["text"]))["input_ids"]]
    half = PER_STEP // 2
    assert seen == first[:half] * 2  # the first of the two batches of 4 rows, in both steps
    assert found["resumed"][:2] == found["whole"][:2]
    assert found["resumed"] == pytest.approx(found["whole"], rel=1e-6)
    assert found["card"]
    assert found["unlabelled"][:2] == [0, 0]
    assert 0 < found["unlabelled"][2] < 10
    assert found["equal rewards"] == [0, 0]
    assert found["norms"] == [0, 0]
    # The reference is still the model before the first step: of the policy itself it would be log 2
    assert abs(found["twice"][0] - math.log(2)) > 0.01
    assert found["coefficients"] == pytest.approx([0.01, 0.02, 0.03, 0.04])  # once in a step
    assert found["adaptive"] == found["coefficients"][-1]
    for result in results:
        assert "181 tokens, more than hydra.context_length 128" in result["long"]
