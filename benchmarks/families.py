"""Every causal language model type of transformers as a tiny random model: does it train, and are
its gradients those of one process?

    python -m benchmarks.families --out docs/models.md

Each type is built from its own default configuration with two layers (or one of each kind) and
small widths, without dropout, as a decoder, and trains five sequences of unequal lengths under a
few strategies on 2 CPU ranks (gloo), in processes of its own. A strategy that a model cannot run
has to be refused by name; loss and every gradient of the others are compared in fp32. What is
found goes to `--records` line by line; with the same file an interrupted command continues. The
exit code is 1 where a gradient is wrong or an error is not one of ds_hydra's. It uses the helpers
of the tests.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
import transformers
from distributed import run_distributed
from models import VOCAB_SIZE
from single_process import random_examples, summed_loss, token_mean_gradients
from test_engine_parity import check_gradients, relative_errors
from tqdm import tqdm
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_hydra.engine.model.experts import is_experts
from ds_hydra.engine.model.model_checks import check_supported, find_other_inputs, find_text_config
from ds_hydra.engine.model.packing_probe import build_stage_model, small_configs
from ds_hydra.engine.model.scheme_support import check_scheme
from ds_hydra.errors import HydraError
from ds_hydra.strategy import Strategy

STRATEGIES = (
    "2x<1,1>",
    "1x<2,1>",
    "1x<1,2>",
    "1x<sp2,1>",
    "1x<cp2,1>",
    "1x<sp2,1;ep=2>",
    "2x<1,1;gather>",
)
SHORT = ("DP 2", "TP 2", "PP 2", "SP 2", "CP 2", "EP 2", "gathered")
"""Heads of columns."""
LENGTHS = (9, 5, 17, 1, 12)
POSITIONS = 20
"""Fewer than the tokens of a micro-batch: learned positions follow the sequences."""
HYDRA = {"context_length": max(LENGTHS), "tokens_per_iteration": sum(LENGTHS)}
TOLERANCE = 1e-5
FP64_TOLERANCE = 1e-6
"""Of parameters in fp64, whose gradients are added up in fp32."""
TIMEOUT_S = 300
MOST_PARAMETERS = 200_000_000
FEW_EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
}
"""What a tiny model has of these at most."""


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OFTEN = {
    "llama": "Llama 3", "qwen2": "Qwen 2.5", "qwen3": "Qwen 3", "qwen3_moe": "Qwen 3, experts",
    "qwen3_next": "Qwen3-Next", "qwen3_5_text": "Qwen 3.5", "gpt_oss": "gpt-oss", "gemma3_text": "Gemma 3",
    "gemma4_text": "Gemma 4", "mistral": "Mistral", "mixtral": "Mixtral", "phi3": "Phi 3 and 4",
    "deepseek_v3": "DeepSeek-V3", "glm4_moe": "GLM 4.5", "granitemoehybrid": "Granite 4-H", "nemotron_h": "Nemotron-H",
    "falcon_h1": "Falcon-H1", "lfm2": "LFM2", "kimi_linear": "Kimi-Linear", "olmo3": "OLMo 3",
}  # fmt: skip
"""Twenty types of models that people train today."""
SETTINGS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "prophetnet": {"disable_ngram_loss": True, "eps": 0.0},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
}
"""What the default configuration of a type leaves open."""


def build(model_type: str) -> torch.nn.Module:
    """A tiny model of `model_type`, fp32, equal on every rank; raises what its own code raises."""
    config = transformers.CONFIG_MAPPING[model_type]()
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    if not isinstance(config, kind.config_class):
        config = find_text_config(config)
    if config.model_type in SETTINGS:
        config = type(config)(**SETTINGS[config.model_type])
    if find_other_inputs(config):
        with torch.device("meta"):
            check_supported(kind(config))
    first: Exception | None = None
    for small in small_configs(config, POSITIONS):
        try:
            return _build_small(kind, small)
        except HydraError:
            raise
        except Exception as error:  # a family's own code, at sizes that it was not written for
            first = first or error
    assert first is not None
    raise first


def _build_small(kind: Any, config: Any) -> torch.nn.Module:
    for key, most in FEW_EXPERTS.items():
        if isinstance(value := vars(config).get(key), int) and value > most:
            setattr(config, key, most)
    config.pad_token_id = 0
    for key, value in list(vars(config).items()):
        if ("drop" in key or "jitter" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
        if "vocab_size" in key and isinstance(value, int):
            setattr(config, key, 256)
        if key == "is_decoder":
            config.is_decoder = True
    torch.manual_seed(0)
    with torch.device("meta"):
        num_parameters = kind(config).num_parameters()
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(
            f"{num_parameters / 1e6:,.0f} million parameters that no width makes fewer"
        )
    model = kind(config).float()
    summed_loss(copy.deepcopy(model), random_examples((5,), VOCAB_SIZE)[0]).backward()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 1 and "sinks" in name:
                param.normal_()
    return model


def try_type(model_type: str) -> dict[str, Any]:
    """On each rank: strategy -> relative error and parameter, or the reason of a refusal; and what
    is known of the type.
    """
    transformers.logging.set_verbosity_error()
    model = build(model_type)
    found: dict[str, Any] = {"has_experts": any(map(is_experts, model.modules()))}
    try:
        stage_model = build_stage_model(model)
    except HydraError as error:
        return {**found, STRATEGIES[0]: {"refused": str(error)}}
    found["one_by_one"] = stage_model.abilities.one_by_one_because
    found["apart"] = sorted(stage_model.abilities.apart)
    found["apart_because"] = stage_model.abilities.apart_because
    runs = []
    for strategy in STRATEGIES:
        (scheme,) = Strategy.parse(strategy).schemes[:1]
        try:
            check_scheme(stage_model, scheme)
            runs.append(strategy)
        except HydraError as error:
            found[strategy] = {"refused": str(error)}
    worst = check_gradients(model, runs, HYDRA, lengths=LENGTHS)
    for strategy in runs:
        errors = [found for case, found in worst.items() if case[0] == strategy]
        error, name, loss_error = max(errors)
        found[strategy] = {"error": error, "parameter": name, "loss_error": loss_error}
    if max(error for error, _, _ in worst.values()) > TOLERANCE:
        found["own_error"] = own_error(build(model_type))
        exact = check_gradients(build(model_type).double(), runs, HYDRA, lengths=LENGTHS)
        found["fp64_error"] = max(error for error, _, _ in exact.values())
    return {**found, "runs": runs}


def own_error(model: torch.nn.Module) -> float:
    """The largest relative error of a gradient of one process in fp32, against fp64."""
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    exact = copy.deepcopy(model).double()
    names = [name for name, _ in model.named_parameters()]
    _, mine = token_mean_gradients(model, examples)
    _, exactly = token_mean_gradients(exact, examples)
    return max(relative_errors([g.double() for g in mine], exactly, names).values())


def examine(model_type: str) -> dict[str, Any]:
    """`try_type` on 2 ranks; a foreign error is found, too."""
    begin = time.monotonic()
    try:
        build(model_type)
    except HydraError as error:
        return {"type": model_type, STRATEGIES[0]: {"refused": str(error)}}
    except Exception as error:  # a type that does not run at these sizes by itself
        return {"type": model_type, "cannot_run": f"{type(error).__name__}: {error}"[:300]}
    try:
        found: dict[str, Any] = run_distributed(try_type, 2, model_type, timeout_s=TIMEOUT_S)[0]
    except (AssertionError, TimeoutError) as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        found = {"foreign": lines[-1][:300] if lines else type(error).__name__}
    return {"type": model_type, **found, "seconds": round(time.monotonic() - begin, 1)}


def is_wrong(record: dict[str, Any]) -> bool:
    """Whether a strategy that ran has a gradient or loss of its own; four times what the one
    process is off itself is allowed, as another order of sums may be, where parameters in fp64 show
    that it is nothing else.
    """
    allowed = TOLERANCE
    if record.get("fp64_error", 1.0) <= FP64_TOLERANCE:
        allowed = max(TOLERANCE, 4 * record["own_error"])
    return any(case["error"] > allowed or case["loss_error"] > TOLERANCE for case in _ran(record))


def has_both_plans(model_type: str) -> bool:
    """Whether transformers ships a tp plan and a pp plan for the decoder of `model_type`."""
    kind = transformers.CONFIG_MAPPING[model_type]
    kind = kind.sub_configs.get("text_config", kind)
    plans = ("base_model_tp_plan", "base_model_pp_plan")
    return all(getattr(kind, plan, None) for plan in plans)


def render(records: list[dict[str, Any]]) -> str:
    """The document: a figure or a numbered reason in each cell."""
    records = sorted(records, key=lambda r: r["type"])
    reasons: dict[str, int] = {}
    by_type = {r["type"]: r for r in records}
    often = [
        f"| {name} | {kind} | {_way(by_type[kind], reasons)} | "
        f"{' | '.join(_answer(by_type[kind].get(strategy), reasons) for strategy in STRATEGIES[1:])} |"
        for kind, name in OFTEN.items()
        if kind in by_type
    ]
    rows = [
        f"| {r['type']} | {_way(r, reasons)} | "
        f"{' | '.join(_cell(r.get(strategy), reasons) for strategy in STRATEGIES)} |"
        for r in records
        if "cannot_run" not in r
    ]
    return "\n".join(
        [
            *_introduction(records),
            "",
            "## Twenty that are trained today",
            "",
            f"| model | type | sequences | {' | '.join(SHORT[1:])} |",
            f"|---|---|---|{'---|' * len(SHORT[1:])}",
            *often,
            "",
            "## All types",
            "",
            f"| type | sequences | {' | '.join(SHORT)} |",
            f"|---|---|{'---|' * len(SHORT)}",
            *rows,
            "",
            "**Reasons**",
            "",
            *(f"{number}. {reason}" for reason, number in reasons.items()),
            *(f"- **{r['type']}**: {_plain(r['foreign'])}" for r in records if "foreign" in r),
            "",
            "**Not judged**, because the type does not run by itself at a small size:",
            "",
            *(f"- {r['type']}: {_plain(r['cannot_run'])}" for r in records if "cannot_run" in r),
            "",
        ]
    )


def _introduction(records: list[dict[str, Any]]) -> list[str]:
    built = [r for r in records if "cannot_run" not in r]
    runs = [r for r in built if r.get("runs")]
    counts = Counter(strategy for r in runs for strategy in r["runs"])
    planned = [r for r in records if has_both_plans(r["type"])]
    cut = [r for r in planned if {"1x<2,1>", "1x<1,2>"}.intersection(r.get("runs", ()))]
    off = [r for r in runs if "own_error" in r]
    return [
        "---",
        "hide:",
        "  - toc",
        "---",
        "",
        "# Models",
        "",
        "    python -m benchmarks.families --out docs/models.md",
        "",
        f"All {len(records)} causal language model types of transformers {transformers.__version__}, as tiny random "
        "models: five sequences of 1 to 17 tokens in micro-batches on 2 CPU ranks, fp32, against one process that runs "
        "each sequence alone. Figures are the largest relative error of a gradient, numbers in brackets the reasons of "
        "refusals below the table; an empty cell was not tried. Dropout and noise are set to 0, `is_decoder` to true.",
        "",
        f"**{len(runs)} run ({sum(not r['has_experts'] for r in runs)} of them without experts), "
        f"{len(built) - len(runs)} are refused by name, {len(records) - len(built)} do not run that small by "
        f"themselves, {sum(map(is_wrong, built))} are wrong, {sum('foreign' in r for r in built)} raise an error that "
        "is not ds_hydra's.** "
        + ", ".join(
            f"{counts[s]} under `{s}` ({h})" for s, h in zip(STRATEGIES, SHORT, strict=True)
        )
        + f". Of the {len(planned)} with both a tp plan and a pp plan {len(cut)} run under TP or PP.",
        "",
        f"A gradient is wrong that is off by more than {TOLERANCE:.0e}, unless the one process is off by a quarter of "
        f"that in fp32 against fp64, and the same strategies are off by at most {FP64_TOLERANCE:.0e} with parameters "
        f"in fp64, whose gradients are still added up in fp32. {_noise(off)} Sequences of a micro-batch run packed, or "
        "one after the other where that would mix them: in the modules that carry states, or in all "
        "of the model ([limits](limits.md)). Types that also read images are not tried as a whole: where a type of "
        "text is named for one, its checkpoint trains as that "
        "([decision 090](decisions/090-text-of-models-that-see.md)).",
    ]


def _noise(records: list[dict[str, Any]]) -> str:
    """What is off by more than the tolerance, in fp32 and in fp64."""
    if not records:
        return "None needs that."
    off = [
        f"{r['type']} ({max(case['error'] for case in _ran(r)):.0e}, the one process {r['own_error']:.0e}, "
        f"in fp64 {r['fp64_error']:.0e})"
        for r in records
    ]
    return (
        f"Off by more, but not wrong, are {', '.join(off)}: their attention does not divide scores by the root "
        "of the head's width, so that those of a random model are some tens, what rounding changes in them is as much "
        "larger, and the gradients of queries and keys are small beside it."
    )


def _ran(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [case for case in record.values() if isinstance(case, dict) and "error" in case]


def _way(record: dict[str, Any], reasons: dict[str, int]) -> str:
    if not record.get("runs"):
        return ""
    way = "one by one" if record["one_by_one"] else "packed"
    if kinds := record["apart"]:
        way += f" but {', '.join(kinds)}"
    because = record["one_by_one"] or record["apart_because"]
    return f"{way}\N{NO-BREAK SPACE}[{_number(because, reasons)}]" if because else way


def _answer(case: dict[str, Any] | None, reasons: dict[str, int]) -> str:
    return "yes" if case is not None and "error" in case else _cell(case, reasons)


def _cell(case: dict[str, Any] | None, reasons: dict[str, int]) -> str:
    if case is None:
        return ""
    if "refused" in case:
        return f"[{_number(case['refused'], reasons)}]"
    return f"{max(case['error'], case['loss_error']):.0e}"


def _number(reason: str, reasons: dict[str, int]) -> int:
    """The number of `reason`, which is one for all classes and numbers in it."""
    text = re.sub(r"^scheme <[^>]*>: ", "", reason)
    text = re.sub(
        r"(?<!train )\b\w+(ForCausalLM|LMHeadModel|ForConditionalGeneration|Decoder)\b",
        "the model",
        text,
    )
    text = re.sub(r"^the model \(model type '[^']*'\):? ", "", text)
    text = re.sub(r"; (use TP|use PP|use ep|leave) [^;]*$", "", text)
    text = re.sub(
        r", because it has layers of type .*?(?=, so that|$)|(?<=one after the other), because .*",
        "",
        text,
    )
    text = re.sub(r"gradients of \S+ are off by \d+%", "gradients are off", text)
    text = re.sub(r"parameters model\.[^ ]*(, model\.[^ ]*)* are", "parameters are", text)
    text = re.sub(r" fails \(.* apart without `(\w+)`.*", r" needs \1", text)
    text = re.sub(r" fails \(.*", " fails", text)
    text = re.sub(r"(cannot run in stages) \(.*|(for each token): .*", r"\1\2", text)
    return reasons.setdefault(_plain(text), len(reasons) + 1)


def _plain(text: str) -> str:
    text = re.sub(r"\s+", " ", text).replace("|", "/").replace("<", "&lt;")
    return text if len(text) <= 240 else text[:239] + "…"


def main() -> int:
    """Examine every type, write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--records", type=Path, default=Path("runs") / "families.jsonl")
    parser.add_argument("--out", type=Path, help="the document to write")
    args = parser.parse_args()
    args.records.parent.mkdir(parents=True, exist_ok=True)
    args.records.touch()
    records = {r["type"]: r for r in map(json.loads, args.records.read_text().splitlines())}
    with args.records.open("a") as file:
        for model_type in tqdm([t for t in args.types if t not in records]):
            records[model_type] = examine(model_type)
            print(json.dumps(records[model_type]), file=file, flush=True)
    found = [records[t] for t in args.types]
    document = render(found)
    print(document.split("\n| type", maxsplit=1)[0])
    if args.out:
        args.out.write_text(document, encoding="utf-8")
    return int(any(is_wrong(r) or "foreign" in r for r in found))


if __name__ == "__main__":
    raise SystemExit(main())
