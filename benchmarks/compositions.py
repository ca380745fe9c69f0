"""Random compositions of what an engine can do, each against one process that runs every sequence
alone.

    python -m benchmarks.compositions --count 1000 --seed 1

A composition is a strategy of 1 to 6 ranks (with SP, CP, experts on several ranks, checkpointed,
gathered and uneven layers), a global batch (label patterns, sequences of one token, fewer tokens
than rows of CP), what is minimised (cross entropy or a loss of `ds_hydra.losses`) and the model and
configuration of its engine (family, so that there is every style of tp plan that runs; LoRA
adapters, their dropout, NEFTune, frozen parameters, embedding and head of other sizes,
checkpointing). Loss and every gradient of an engine in fp32 are compared
with the one process in fp64. One engine serves
`CASES_PER_ENGINE` compositions, one start of ranks all engines of a world size. What is found goes
to `--records` line by line; with the same file an interrupted command continues. Everything follows
from the seed and the number of an engine: `--engine 17` repeats one. The exit code is 1 where
something is wrong or raises what is not an error of ds_hydra. Ranks are CPU processes (gloo); it
uses the helpers of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import test_lora
import test_losses
import test_noise
import torch
import torch.distributed as dist
from distributed import run_distributed
from engines import start_hydra
from models import (
    BUILDERS,
    FAMILIES,
    MIXTURES_OF_EXPERTS,
    VOCAB_SIZE,
    WHOLE_FEATURES,
    tiny,
)
from single_process import Examples
from test_engine_parity import RELATIVE_TOLERANCE, hand_plan, relative_errors
from torch import Tensor, nn

from ds_hydra.engine import HydraEngine
from ds_hydra.engine.iteration import linearised
from ds_hydra.engine.ranks.agreement import gather_rows
from ds_hydra.errors import HydraError
from ds_hydra.strategy import Scheme, Strategy

CASES_PER_ENGINE = 12
MOST_RANKS = 6
WIDTHS = (
    {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
    {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5},
)
DRAWN = (
    *FAMILIES,
    *MIXTURES_OF_EXPERTS,
    "apertus",
    "minicpm3",
    *("phi3", "olmo2", *WHOLE_FEATURES) * 2,
)
"""Families, those whose tp plan gathers or splits features more often."""
LATENT = ("deepseek_v3", "minicpm3")
ATTENTION = r".*self_attn\.(q|k|v|qkv|o|q_a|q_b|kv_b|kv_a)_proj(_with_mqa)?"
LINEARS = rf"{ATTENTION}|.*mlp\.(gate_up|gate|up|down)_proj"
"""Linears by any name; `peft` takes the second for experts, too, which is refused."""
ADAPTERS: tuple[dict[str, Any] | None, ...] = (
    None,
    None,
    {"target_modules": LINEARS},
    {"target_modules": ATTENTION},
    {"target_modules": LINEARS, "use_rslora": True, "r": 3},
    {"target_modules": LINEARS, "lora_dropout": test_noise.RATE},
    {"target_modules": LINEARS, "lora_dropout": test_noise.RATE, "r": 2},
)
OF_PAIRS = ("dpo", "ipo", "simpo")
LOSSES = (*[None] * 4, "cross entropy", "grpo", "grpo of sequences", "distillation", *OF_PAIRS)
"""None, or a name of `test_losses.CASES`."""
FROZEN = (None, None, None, "layers.0.", "embed_tokens", "lm_head", "norm", "mlp", "self_attn")
LABELS = ("all", "all", "none", "last", "first", "half", "completion")
TIMEOUT_S = 2400

MOST_OWN_ERRORS = 8
"""Two roundings of a gradient that is 0 in exact arithmetic (queries of a first token, which sees
itself alone) have differed by 4.5 times what one is off.
"""
MOST_ROUNDINGS = 8
"""[Note: Terms that cancel] The backward of a softmax is P (dP - D): P dP of every score less P D,
D the mean of its row, two sums of the same numbers. Of a first token, which sees itself alone, they
are equal, and so are all gradients of queries and keys where only first tokens are predicted from:
0 in exact arithmetic. In fp32 such a gradient is what the two sums are rounded by, which follows
their size and nothing else. In units of 2^-24 of the terms (the gradient that P dP alone would
give) one process was off by 0.06 to 2.4 in the sixteen such gradients of one composition (DPO, two
sequences of three tokens, whose second token alone has a label), the engine by 2.7 in that whose
terms are the largest: the same rounding, though 12 times as far off as any of the one process where
all are compared with the same floor. A dot product of n elements is off by n units at most, and
heads have 8.
"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an engine is made of."""

    family: str
    overrides: dict[str, int]
    adapter: dict[str, Any] | None
    frozen: str | None
    """Parameters with this in their name are not trained."""
    embedding_rows: int
    head_rows: int
    hydra: dict[str, Any]

    def fits(self, tp: int, sp: int = 1) -> bool:
        """Whether heads can be divided among so many ranks."""
        heads, kv_heads = (
            self.overrides[f"num_{name}_heads"] for name in ("attention", "key_value")
        )
        return heads % (tp * sp) == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)

    def build(self) -> nn.Module:
        """The model, equal on every rank."""
        model = tiny(self.family, **self.overrides)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        is_tied = embedding.weight is head.weight
        assert is_tied == (self.family in TIED), f"{self.family} in TIED?"
        embedding.weight = resized(embedding.weight, self.embedding_rows)
        embedding.num_embeddings = self.embedding_rows
        head.weight = embedding.weight if is_tied else resized(head.weight, self.head_rows)
        head.out_features = self.head_rows
        model.config.vocab_size = self.embedding_rows
        if self.adapter is not None:
            model = test_lora.with_adapters(model, **self.adapter)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        kept = [name for name, _ in trained if self.frozen is None or self.frozen not in name]
        for name, param in trained:
            param.requires_grad_(name in kept or not kept)
        return model


@dataclass(frozen=True, kw_only=True)
class Case:
    """A global batch and how it is trained on."""

    strategy: str
    lengths: tuple[int, ...]
    labels: tuple[str, ...]
    placement: str
    """"planned", or rows dealt by hand to all pipelines or to all but one."""
    loss: str | None
    seed: int

    def examples(self, setup: Setup) -> Examples:
        """Random tokens; labels that are no row of the head become one."""
        generator = torch.Generator().manual_seed(self.seed)
        examples = []
        for length, pattern in zip(self.lengths, self.labels, strict=True):
            ids = torch.randint(0, setup.embedding_rows, (length,), generator=generator)
            is_counted = torch.zeros(length, dtype=torch.bool)
            if pattern == "half":
                is_counted = torch.rand(length, generator=generator) < 0.5
            else:
                is_counted[COUNTED[pattern](length)] = True
            labels = (ids % setup.head_rows).masked_fill(~is_counted, -100)
            examples.append({"input_ids": ids, "labels": labels})
        return test_losses.with_fields(examples, setup.head_rows, seed=self.seed)


COUNTED = {
    "all": lambda length: slice(None),
    "none": lambda length: slice(0),
    "last": lambda length: slice(length - 1, None),
    "first": lambda length: slice(1, 2),
    "completion": lambda length: slice(2 * length // 3, None),
}
"""Pattern -> which labels count."""


def resized(weight: nn.Parameter, num_rows: int) -> nn.Parameter:
    """`weight` with rows cut off, or repeated at its end."""
    index = torch.arange(num_rows) % len(weight)
    return nn.Parameter(weight.detach()[index].clone())


def draw_setup(generator: random.Random) -> Setup:
    """Half of the models have a vocabulary of another size, untied ones two of them."""
    family = generator.choice(DRAWN)
    overrides = {**generator.choice(WIDTHS), "num_hidden_layers": generator.randint(2, 4)}
    if family in LATENT:
        overrides["num_key_value_heads"] = overrides["num_attention_heads"]
    rows = [VOCAB_SIZE, VOCAB_SIZE + 9, VOCAB_SIZE - 13, 256, 97]
    embedding_rows = generator.choice([VOCAB_SIZE] * 3 + rows)
    head_rows = embedding_rows if family in TIED else generator.choice([embedding_rows] * 3 + rows)
    adapter = generator.choice(ADAPTERS)
    if adapter is not None and family in MIXTURES_OF_EXPERTS:
        adapter = {**adapter, "target_modules": ATTENTION}
    hydra: dict[str, Any] = {
        "activation_checkpointing": generator.random() < 0.3,
    }
    if generator.random() < 0.25:
        hydra["neftune_noise_alpha"] = test_noise.ALPHA
    return Setup(
        family=family,
        overrides=overrides,
        adapter=adapter,
        frozen=generator.choice(FROZEN),
        embedding_rows=embedding_rows,
        head_rows=head_rows,
        hydra=hydra,
    )


TIED = frozenset(
    {"llama_tied", "qwen2", "gemma2", "gemma3", "granite_swa", "ernie4_5_moe", "minicpm3"}
)
"""Families whose head is the embedding."""


def draw_case(generator: random.Random, setup: Setup, num_ranks: int) -> Case:
    """Mostly 1 to 9 short sequences, one of them with something to predict."""
    lengths = [generator.choice((1, 2, 3, 5, 9, 17, 40)) for _ in range(generator.randint(1, 9))]
    lengths = [length + generator.randint(0, 5) * (length > 3) for length in lengths]
    lengths[0] = max(2, lengths[0])
    labels = [generator.choice(LABELS) for _ in lengths]
    labels[0] = generator.choice([name for name in LABELS if name not in ("none", "half")])
    loss = generator.choice(LOSSES)
    if loss in OF_PAIRS and len(lengths) % 2:
        lengths, labels = [*lengths, lengths[0]], [*labels, labels[0]]
    order = generator.sample(range(len(lengths)), len(lengths))
    return Case(
        strategy=draw_strategy(generator, setup, num_ranks),
        lengths=tuple(lengths[i] for i in order),
        labels=tuple(labels[i] for i in order),
        placement=generator.choice(("planned", "planned", "dealt", "one idle")),
        loss=loss,
        seed=generator.randrange(1 << 31),
    )


def draw_strategy(generator: random.Random, setup: Setup, num_ranks: int) -> str:
    """Pipelines until ranks or luck run out."""
    schemes: list[Scheme] = []
    free = num_ranks
    while free and (not schemes or generator.random() < 0.6):
        scheme = draw_scheme(generator, setup, free)
        schemes.append(scheme)
        free -= scheme.num_devices
    if generator.random() < 0.3 and all(scheme.pp == 1 for scheme in schemes):
        schemes = [replace(scheme, gather=True) for scheme in schemes]
    return str(Strategy(tuple(sorted(schemes, reverse=True))))


def draw_scheme(generator: random.Random, setup: Setup, free: int) -> Scheme:
    """One that fits `free` ranks, and the heads nineteen times in twenty."""
    layers = setup.overrides["num_hidden_layers"]
    takes_any = generator.random() < 0.05
    tp = generator.choice([n for n in range(1, free + 1) if takes_any or setup.fits(n)])
    pp = generator.randint(1, min(layers, free // tp))
    pieces = [n for n in range(1, free // (tp * pp) + 1) if takes_any or setup.fits(tp, n)]
    sp = generator.choice(pieces) if generator.random() < 0.3 else 1
    cp = generator.randint(1, free // (tp * pp * sp)) if generator.random() < 0.4 else 1
    ep = 1
    if setup.family in MIXTURES_OF_EXPERTS and generator.random() < 0.6:
        ep = generator.choice([n for n in (1, 2, 4) if (tp * sp) % n == 0])
    stages: tuple[int, ...] = ()
    if pp > 1 and generator.random() < 0.3:
        cuts = sorted(generator.sample(range(1, layers), pp - 1))
        stages = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    may_checkpoint = not setup.hydra["activation_checkpointing"] and generator.random() < 0.3
    return Scheme(
        tp,
        pp,
        sp=sp,
        cp=cp,
        ep=ep,
        stages=stages,
        ckpt=generator.randint(1, layers) if may_checkpoint else 0,
    )


def draw_engine(seed: int, number: int) -> tuple[Setup, list[Case]]:
    """Engine `number`: the same for a seed, whatever else runs."""
    generator = random.Random(f"{seed}-{number}")
    setup = draw_setup(generator)
    num_ranks = ranks_of(number)
    return setup, [draw_case(generator, setup, num_ranks) for _ in range(CASES_PER_ENGINE)]


def ranks_of(number: int) -> int:
    return 1 + number % MOST_RANKS


def run_engines(seed: int, numbers: Sequence[int], records: str) -> None:
    """Compare the compositions of these engines; rank 0 writes what came of each."""
    warnings.simplefilter("ignore")
    for number in numbers:
        setup, cases = draw_engine(seed, number)
        write(records, {"engine": number, "state": "begun"})
        try:
            model = setup.build()
            reference = copy.deepcopy(model)
            engine = start_hydra(model, hydra=copy.deepcopy(setup.hydra))
        except HydraError as error:
            for index in range(len(cases)):
                write(records, {"engine": number, "case": index, "refused": str(error)})
        else:
            for index, case in enumerate(cases):
                found = compare(engine, model, reference, setup, case)
                write(records, {"engine": number, "case": index, **found})
            engine.destroy()
        write(records, {"engine": number, "state": "ended"})


def compare(
    engine: HydraEngine, model: nn.Module, reference: nn.Module, setup: Setup, case: Case
) -> dict[str, Any]:
    """The errors of loss and gradients, or why the composition is refused."""
    examples = case.examples(setup)
    try:
        loss, gradients, has_empty_rows = train(engine, model, examples, case)
    except HydraError as error:
        return {"refused": str(error)}
    if dist.get_rank():
        return {}
    found = worst_errors(reference, examples, setup, case, loss, gradients)
    return {**found, "empty_rows": has_empty_rows}


def train(
    engine: HydraEngine, model: nn.Module, examples: Examples, case: Case
) -> tuple[float, dict[str, Tensor], bool]:
    """Loss and gradients by name of one iteration without a step, and whether a micro-batch has
    fewer tokens than rows.
    """
    strategy = Strategy.parse(case.strategy)
    given = None if case.loss is None else test_losses.CASES[case.loss]
    iteration = engine.hydra.source.plan(examples, strategy, engine.global_steps, loss=given)
    plan = iteration.plan
    if case.placement != "planned":
        plan = hand_plan(strategy, examples, empty_pipeline=case.placement == "one idle")
    iteration = replace(iteration, planned=replace(iteration.planned, plan=plan))
    iteration = linearised(iteration, engine.hydra.propagator)
    grads_P = engine._zero_gradient_shards()
    outcome = engine.hydra.propagator.train(
        iteration.plan, iteration.load, grads_P, 1.0, iteration.objective
    )
    loss = engine.hydra.gather_outcomes(outcome).loss()
    has_empty_rows = any(
        sum(case.lengths[i] for i in micro_batch) < pipeline.scheme.cp
        for pipeline in plan.pipelines
        for micro_batch in pipeline.micro_batches
    )
    names = {id(param): name for name, param in model.named_parameters()}
    gradients = {
        names[id(param)]: gather_rows(grad_P).flatten()[: spec.numel].view(spec.shape)
        for param, spec, grad_P in zip(
            engine.hydra.stage_model.params, engine.hydra.stage_model.specs, grads_P, strict=True
        )
        if spec.requires_grad
    }
    return loss, gradients, has_empty_rows


def worst_errors(
    reference: nn.Module,
    examples: Examples,
    setup: Setup,
    case: Case,
    loss: float,
    gradients: dict[str, Tensor],
) -> dict[str, Any]:
    """Relative error of the loss, and the largest one of a gradient with its name.

    Where gradients cancel, one process in fp32 is itself off what it is in fp64: `own_error`, and
    rounding their terms alone may be `rounding` [Note: Terms that cancel].
    """
    wanted_loss, wanted = one_process(reference, examples, setup, case, torch.float64)
    names = sorted(gradients)
    assert names == sorted(wanted), "other parameters have gradients"
    exactly = [wanted[n] for n in names]

    def off(by: dict[str, Tensor]) -> dict[str, float]:
        return relative_errors([by[n].double() for n in names], exactly, names)

    errors = off(gradients)
    allowed = dict.fromkeys(names, RELATIVE_TOLERANCE)
    more = {}
    if max(errors.values()) > RELATIVE_TOLERANCE:
        _, own = one_process(reference, examples, setup, case, torch.float32)
        more["own_error"] = max(off(own).values())
        with softmax_without_means():
            _, terms = one_process(reference, examples, setup, case, torch.float64, "eager")
        rounding = off({n: wanted[n] + 2.0**-24 * terms[n] for n in names})
        allowed = {
            n: max(
                RELATIVE_TOLERANCE,
                MOST_OWN_ERRORS * more["own_error"],
                MOST_ROUNDINGS * rounding[n],
            )
            for n in names
        }
    name = max(errors, key=lambda name: errors[name] / allowed[name])
    if more:
        more |= {"rounding": rounding[name]}
    loss_error = abs(loss - wanted_loss) / max(1.0, abs(wanted_loss))
    return {
        "loss_error": loss_error,
        "name": name,
        "error": errors[name],
        "allowed": allowed[name],
        **more,
    }


class SoftmaxWithoutMean(torch.autograd.Function):
    """A softmax whose backward leaves out the mean that the gradients of scores are taken off."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dim: int) -> Tensor:
        probabilities = scores.softmax(dim)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * gradients[0], None


@contextlib.contextmanager
def softmax_without_means() -> Iterator[None]:
    """Inside attention gives gradients of queries and keys as large as the terms of which they are
    differences [Note: Terms that cancel].
    """

    def softmax(scores: Tensor, dim: int, **_: Any) -> Tensor:
        return SoftmaxWithoutMean.apply(scores, dim)

    usual, nn.functional.softmax = nn.functional.softmax, softmax
    try:
        yield
    finally:
        nn.functional.softmax = usual


def one_process(
    model: nn.Module,
    examples: Examples,
    setup: Setup,
    case: Case,
    dtype: torch.dtype,
    attention: str | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of what is trained, noise of each sequence included."""
    model = copy.deepcopy(model).to(dtype)
    for module in model.modules():  # the grouped product knows no fp64
        config = getattr(module, "config", None)
        if attention is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = attention
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
    if setup.adapter is not None and "lora_dropout" in setup.adapter:
        test_noise.draw_alone(model)
    if "neftune_noise_alpha" in setup.hydra:
        test_noise.with_noise_alone(model)
    test_noise.count_sequences(model)
    loss = test_losses.wanted_of(case.loss or "plain", model, examples)
    loss.backward()
    return loss.item(), {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def is_wrong(record: dict[str, Any]) -> bool:
    """Whether loss or a gradient is off by more than rounding explains."""
    if "error" not in record:
        return False
    is_near = record["error"] <= record["allowed"]
    return not (is_near and record["loss_error"] <= RELATIVE_TOLERANCE)


def write(path: str, record: dict[str, Any]) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        with Path(path).open("a") as file:
            file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(seed: int, numbers: Sequence[int], records: Path) -> None:
    """Every engine once, ranks started once for each world size, and again after a crash."""
    for num_ranks in range(1, MOST_RANKS + 1):
        while pending := [
            n for n in numbers if ranks_of(n) == num_ranks and n not in states(records, "ended")
        ]:
            begin = time.monotonic()
            try:
                run_distributed(
                    run_engines, num_ranks, seed, pending, str(records), timeout_s=TIMEOUT_S
                )
            except AssertionError as error:
                crashed = states(records, "begun")[-1]
                write(str(records), {"engine": crashed, "crashed": str(error)})
                write(str(records), {"engine": crashed, "state": "ended"})
            print(
                f"{num_ranks} ranks, engines {pending[0]} to {pending[-1]}: "
                f"{time.monotonic() - begin:.0f} s",
                file=sys.stderr,
                flush=True,
            )


def states(records: Path, state: str) -> list[int]:
    """Engines of which the file says so, in its order."""
    return [record["engine"] for record in read(records) if record.get("state") == state]


def report(seed: int, numbers: Sequence[int], records: Path) -> bool:
    """Print what was found; whether everything was right."""
    mine = {}
    for record in read(records):
        if record["engine"] in numbers and ("case" in record or "crashed" in record):
            mine[record["engine"], record.get("case")] = record
    wrong = [record for record in mine.values() if is_wrong(record)]
    crashed = [record for record in mine.values() if "crashed" in record]
    refused = Counter(
        re.sub(r"<[^>]*>|\d[\d,.]*", "N", r["refused"])[:150]
        for r in mine.values()
        if "refused" in r
    )
    compared = [record for record in mine.values() if "error" in record]
    for record in wrong + crashed:
        setup, cases = draw_engine(seed, record["engine"])
        case = asdict(cases[record["case"]]) if "case" in record else ""
        print(f"WRONG: {record}\n  {setup}\n  {case}")
        print(f"  again: --seed {seed} --engine {record['engine']}")
    counted: Counter[str] = Counter()
    for record in compared:
        setup, cases = draw_engine(seed, record["engine"])
        counted.update(parts_of(setup, cases[record["case"]], record))
    print("with " + ", ".join(f"{name} {count}" for name, count in counted.most_common()))
    for reason, count in refused.most_common():
        print(f"refused {count:4}  {reason}")
    worst = max((r["error"] for r in compared if "own_error" not in r), default=0.0)
    print(
        f"{len(compared)} compositions compared, {len(wrong)} wrong, {len(crashed)} engines crashed, "
        f"{sum(refused.values())} refused; largest error {worst:.1e}, "
        f"{sum('own_error' in r for r in compared)} with cancelling gradients"
    )
    return not wrong and not crashed


def parts_of(setup: Setup, case: Case, record: dict[str, Any]) -> list[str]:
    """What a composition has of that which is counted."""
    schemes = Strategy.parse(case.strategy).schemes
    has_tp = any(scheme.tp > 1 for scheme in schemes)
    adapter = setup.adapter
    plan = BUILDERS[setup.family](**setup.overrides).config.base_model_tp_plan or {}
    styles = sorted(set(plan.values())) if has_tp else []
    parts = {
        "TP": has_tp,
        "PP": any(scheme.pp > 1 for scheme in schemes),
        "SP": any(scheme.sp > 1 for scheme in schemes),
        "CP": any(scheme.cp > 1 for scheme in schemes),
        "fewer tokens than rows": record["empty_rows"],
        "EP": any(scheme.ep > 1 for scheme in schemes),
        "experts": setup.family in MIXTURES_OF_EXPERTS,
        "gathered layers": any(scheme.gather for scheme in schemes),
        "adapters": adapter is not None,
        "dropout of adapters": adapter is not None and "lora_dropout" in adapter,
        "NEFTune": "neftune_noise_alpha" in setup.hydra,
        "loss objects": case.loss is not None,
    }
    whose = "adapters under TP" if adapter is not None else "TP"
    return [name for name, has in parts.items() if has] + [f"{whose} over {s}" for s in styles]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="compositions to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", type=int, help="only the compositions of this engine")
    parser.add_argument("--records", type=Path, help="file to continue and to add to")
    given = parser.parse_args()
    numbers = range(-(-given.count // CASES_PER_ENGINE))
    if given.engine is not None:
        numbers = range(given.engine, given.engine + 1)
    with tempfile.TemporaryDirectory() as folder:
        records = given.records or Path(folder) / "records.jsonl"
        run(given.seed, numbers, records)
        return 0 if report(given.seed, numbers, records) else 1


if __name__ == "__main__":
    sys.exit(main())
