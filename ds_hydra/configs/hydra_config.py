"""Configuration of ds_hydra: the strict "hydra" section of the DeepSpeed JSON, and what to write
instead where something in it is wrong.

Lengths are tokens, times milliseconds, sizes bytes. Paths are relative to the directory the ranks
run in; one that begins with ~ is in a home folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)
from pydantic_core import ErrorDetails

from ds_hydra.configs.files import (
    LARGEST,
    MAX_DEVICES,
    MAX_LENGTH_TOKENS,
    MAX_TOKENS_PER_ITERATION,
    plain_json,
)
from ds_hydra.errors import HydraConfigError
from ds_hydra.refusals import Refusal, each

_Value = TypeVar("_Value")


def _whole(value: _Value) -> _Value | int:
    """JSON users write 2e5 for 200000; a number with a fraction stays a float, which is refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _path(value: str) -> str:
    """Every text of the section is a path or a name; no file system has longer ones."""
    if len(value.encode()) >= 4096 or max(len(part.encode()) for part in value.split("/")) > 255:
        raise ValueError("wanted a path of less than 4096 bytes whose parts have 255 at most")
    return value


def _in_home(value: str) -> str:
    """Return the path with the home folder in place of `~` or `~user`."""
    path = os.path.expanduser(value)
    if path.startswith("~"):
        raise ValueError(
            f"this machine knows no home folder {value.split('/')[0]}; write the whole path, or ./{value}"
        )
    return path


ATTENTION_KERNELS = (
    "flash_attention_3",
    "flash_attention_4",
    "cudnn",
    "flash_attention_2",
    "varlen",
    "per_sequence",
)
"""The fastest first."""


Float8Name: TypeAlias = Literal["tensorwise", "rowwise", "tensorwise_emulated", "rowwise_emulated"]


def _attention(value: str) -> str:
    if value in ("auto", *ATTENTION_KERNELS) or re.fullmatch(r"[^/:@]+/[^/:@]+(@[^/:@]+)?", value):
        return value
    near = get_close_matches(value, ATTENTION_KERNELS, 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f'{value!r} is no kernel{meant or "."} Known are "auto", {", ".join(map(repr, ATTENTION_KERNELS))}, and '
        '"owner/repository" of the Hugging Face hub'
    )


def _as_tuple(value: object) -> object:
    """Turn a list, which JSON has, into a tuple."""
    if isinstance(value, str):
        raise ValueError(f"write a list: [{json.dumps(value)}]")
    return tuple(value) if isinstance(value, list) else value


def _lengths(value: object) -> object:
    if not isinstance(value, list | tuple) or not all(isinstance(length, int) for length in value):
        return value
    lengths = tuple(sorted(set(value)))
    if len(lengths) < 3 or lengths[0] < 2:
        raise ValueError(
            "wanted three different lengths of 2 tokens or more, such as [64, 512, 4096]"
        )
    return lengths


def _strategies(value: object) -> tuple[str, ...] | str | None:
    if value is None:
        return None
    if isinstance(value, str) and value and "<" not in value:
        return _in_home(value)
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(text, str) and text for text in value)
    ):
        return tuple(value)
    if isinstance(value, str) and value:
        raise ValueError(f"write [{json.dumps(value)}]; a string alone is the path of a JSON file")
    raise ValueError(
        'wanted a list such as ["4x<1,1>", "1x<2,1> + 2x<1,1>"], or the path of a JSON file'
    )


Count: TypeAlias = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Index: TypeAlias = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Text: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(_path)]
PathText: TypeAlias = Annotated[Text, AfterValidator(_in_home)]
AttentionName: TypeAlias = Annotated[str, AfterValidator(_attention)]

# Upper bounds: beyond them a run could not start, or would never end.
DAY_S = 86_400
"""Longest that one rank, plan or program is waited for: nobody waits longer for a sign of life."""
MAX_SEED = (1 << 63) - 1
"""Compiled planning and torch hold a seed in 64 bits, with a sign."""
MAX_EFFORT = 1024
"""Maximum of repeats and iterations read ahead: hundreds of times the defaults. More of them change
nothing and only take time.
"""
MAX_WORKERS = 256
"""Planning processes beside rank 0: as many as a host has cores."""
MAX_GROUPS = 1 << 20
"""Process groups: thousands for each rank of the largest cluster."""
MAX_ITERATIONS = 1 << 31
"""Iterations of a run, so that one is never traced anew."""

Length: TypeAlias = Annotated[Count, Field(le=MAX_LENGTH_TOKENS)]
Effort: TypeAlias = Annotated[Count, Field(le=MAX_EFFORT)]
Seconds: TypeAlias = Annotated[Count, Field(le=DAY_S)]

Space: TypeAlias = Literal["full", "measured", "plain"]
"""Schemes that a proposal may use: all that the profile measured or that follow from it; those that
it measured; <TP,PP>.
"""


class _Section(BaseModel):
    """Frozen, strict about types, and closed: a key that is not a field is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class PlannerConfig(_Section):
    """`hydra.planner`: how much work goes into the plan of an iteration."""

    space: Space = "full"
    """Schemes to propose where `strategies` is null: every scheme that the profile measured and
    those that follow from it ("full": SP, CP, gathered and checkpointed layers), those that it
    measured ("measured"), or `<TP,PP>` alone ("plain").

    A profile that is measured at the start has gathered layers, too. What nobody measured is
    estimated (SP from TP, a checkpointed layer takes a third more); rank 0 logs which, and measured
    iterations correct it. """

    num_workers: Annotated[Index, Field(le=MAX_WORKERS)] = 1
    """Planning processes beside rank 0; 1 will do unless planning is slower than training, 0 is
    none.
    """

    solver: Literal["cbc", "highs", "none"] = "cbc"
    """ILP solver behind `mip`; "cbc" comes with it, "highs" needs the extra `ds_hydra[highs]`,
    "none" starts no ILP.
    """

    refit: Literal["log", "plan"] = "plan"
    """Measured times correct the profile's latency in the plans to come ("plan"), or only in the
    log.

    Plans of "plan" depend on measured times, and one that is 10 s late gives way to the
    heuristic's; "log" keeps a repeated run bit-identical.
    """


class ProfilingConfig(_Section):
    """`hydra.profiling`: the measurement made at the start when no profile is given."""

    lengths: Annotated[tuple[Length, ...], BeforeValidator(_lengths)] | None = None
    """Lengths to measure, in tokens, 3 or more for 3 coefficients; null takes powers of four up to
    context.
    """

    repeats: Effort = 1
    """Most timed runs of each length, of which the median counts; 1 at the start, because times
    measured while training correct it.
    """


class FaultsConfig(_Section):
    """`hydra.faults`: what happens when a rank is lost or told to stop."""

    watchdog: bool = True
    """Whether ranks watch each other over one TCP connection each to rank 0; off: collectives time
    out.
    """

    silence_s: Seconds = 60
    """Seconds without a sign of life after which a rank counts as lost; a process that ends is seen
    at once. Set it above what one call may hold Python's lock for (a regular expression of a
    reward, a C extension).
    """

    grace_s: Seconds = 10
    """Seconds after a loss until a rank that still waits in a collective ends itself, with exit
    code 75.
    """

    save_on_sigterm: PathText | None = None
    """Folder for a checkpoint when any rank gets SIGTERM, after the iteration or the batch of an
    evaluation that is under way. Then a handler of SIGTERM that the program has set before the
    engine is called, and the process ends with exit code 0. Null: none. With HydraTrainer the
    checkpoint is a `checkpoint-N`: name its output_dir.
    """


class CheckpointConfig(_Section):
    """`hydra.checkpoint`: how checkpoints are written."""

    asynchronous: bool = False
    """Whether checkpoints are written beside training: `save_checkpoint` returns when the states
    are copied into the host's memory, and a thread of each rank writes them. One is under way at
    most.

    Off: a script may read a checkpoint as soon as `save_checkpoint` has returned; with it that
    takes `engine.wait_for_checkpoint()`. The copies, as many bytes as the states, stay in memory
    from one checkpoint to the next. """


class LinkConfig(_Section):
    """`hydra.link`: how slices and gradients travel between ZeRO-3's shards and propagation."""

    devices_per_node: Annotated[Count, Field(le=MAX_DEVICES)] | None = None
    """Consecutive ranks of one node, into which a slice comes once and spreads there; null compares
    the ranks' host names. Give it where a host is not a node; with 1 every rank reads for itself.
    """

    overlap: bool = True
    """Whether pull and push run beside computation, in a stream of accelerators; false only to
    compare or debug. Off on CPU ranks, and, with a warning, on CUDA devices that started without
    what it needs (`CUDA_DEVICE_MAX_CONNECTIONS=32`, `CUDA_MODULE_LOADING=EAGER`; `import ds_hydra`
    sets them).
    """

    _gradient_dtype: Literal["fp32", "bf16"] = PrivateAttr("fp32")

    @property
    def gradient_dtype(self) -> Literal["fp32", "bf16"]:
        """Type in which gradients are sent; owners always sum in fp32. DeepSpeed's
        `communication_data_type` says it, which no key repeats; see `with_gradient_dtype`.
        """
        return self._gradient_dtype

    def with_gradient_dtype(self, dtype: Literal["fp32", "bf16"]) -> LinkConfig:
        """The same with gradients sent as `dtype`."""
        copied = self.model_copy()
        copied._gradient_dtype = dtype
        return copied


class HydraConfig(_Section):
    """The whole section. `HydraConfig.parse` builds it and raises HydraConfigError with every
    problem.
    """

    context_length: Annotated[Length, Field(ge=2)]
    """Longest sequence the model is trained on, in tokens; no default: memory and time depend on
    it.
    """

    tokens_per_iteration: Annotated[Count, Field(le=MAX_TOKENS_PER_ITERATION)]
    """Token budget of one global batch, over all ranks; no default: the learning rate
    depends on it.
    """

    strategies: Annotated[tuple[str, ...] | str | None, BeforeValidator(_strategies)] = None
    """Candidate strategies as a list of text forms, or a `ds_hydra.strategies/1` file; null
    proposes them.

    A pipeline is `<TP,PP>`, or `<spN,TP,PP>` (`<spN,PP>`) where N ranks share its micro-batches by
    sequence parallelism, `<cpN,TP,PP>` by context parallelism, `<spM,cpN,TP,PP>` by both, or
    `<cpN,spM,TP,PP>` where the ranks of CP are to be the neighbours. Options may follow:
    `<2,4;ckpt=12;stages=9,8,8,7>` (checkpointed layers, layers of each stage),
    `<1,1;ckpt=8;offload>` (what they keep is in the host's memory), `<1,1;gather>` (layers gathered
    for every pass), `<1,1;hpz>` (gathered, with weights of other nodes kept on the node),
    `<sp4,1;ep=4>` (four ranks of an SP x TP group share a layer's experts).
    """

    profile: PathText | None = None
    """A `ds_hydra.profile/1` file or the name of a shipped one; null measures this machine at the
    start.
    """

    memory_limit_bytes: Annotated[Count, Field(le=LARGEST)] | None = None
    """Bytes one rank may use, in place of the profile's hardware memory; null takes the
    profile's.
    """

    over_length: Literal["truncate", "drop", "refuse"] = "truncate"
    """Sequences above the context are cut (as is usual in pre-training), dropped, or an error."""

    text_column: Text = "text"
    """Dataset column to tokenise where there is no `input_ids`; "text" is the custom of the hub."""

    tokenizer: PathText | None = None
    """Path or hub id of the tokenizer; null needs a dataset that holds `input_ids`."""

    seed: Annotated[Index, Field(le=MAX_SEED)] = 42
    """Seed of the order of the data, of the planner's trials, of adapters' dropout and NEFTune; 42
    as in the Hugging Face Trainer.
    """

    shuffle: bool = True
    """Whether every epoch has an order of its own; false keeps the order of the dataset."""

    stream_window: Effort = 8
    """Iterations' worth of tokens of a stream (`datasets.IterableDataset`) that are read ahead,
    shuffled with each other where `shuffle` is true, and kept in checkpoints until they are
    trained; 8 take some MB.
    """

    activation_checkpointing: bool = False
    """Recompute each decoder layer in backward: 1/3 more time, far less memory; off: short contexts
    fit, and strategies checkpoint as many layers as they need (`ckpt`).
    """

    neftune_noise_alpha: float = Field(default=0.0, ge=0, le=MAX_EFFORT)
    """Noise in the embedding while training, at most alpha / sqrt(L d) for a sequence of L tokens;
    papers take 5 to 15, 0 adds none.
    """

    attention: AttentionName = "auto"
    """Kernel of packed attention: "flash_attention_3", "flash_attention_4", "cudnn" (long
    sequences and pieces of them by cuDNN, others by "varlen"), "flash_attention_2", "varlen"
    (torch's own), "per_sequence" (no kernel), or one of the Hugging Face hub such as
    "kernels-community/flash-attn3".

    "auto": what the model was loaded with (`attn_implementation`), else the first of this order
    that is installed, made for the device, takes the model's heads and is right in a trial at the
    start; one that is named and cannot run is an error.
    """

    compile_layers: bool = False
    """Run each decoder layer through torch.compile: faster passes for a minute of compilation at
    the start; `ds-hydra init` turns it on for accelerators.
    """

    float8: Float8Name | None = None
    """Multiply in 8 bits in the linear layers of decoder layers, by torchao's float8 training: one
    scale for each operand ("tensorwise", faster), or one for each of its rows ("rowwise", more
    exact); null multiplies in the model's dtype.

    Weights, gradients, the output head and what travels between ranks stay what they are. Needs
    `ds_hydra[float8]`, a device of sm89 (Ada, Hopper) or gfx94x (MI300) on, features in multiples
    of 16. "tensorwise_emulated" and "rowwise_emulated" compute the same on any device, slowly.
    """

    float8_exclude: Annotated[tuple[Text, ...], BeforeValidator(_as_tuple)] = ()
    """Parts of names of linear layers that do not multiply in 8 bits, as "shared_expert_gate" or
    "layers.0."; none by default.
    """

    deterministic: bool = False
    """Whether the same plans give bit-identical losses on an accelerator, as they always do on CPU
    ranks: torch's deterministic algorithms, flash-attn's backward in one order.

    Off: attention's backward adds by atomics, which is faster and takes less memory.
    """

    run_dir: PathText | None = None
    """Folder for `metrics.jsonl` and the plans; null writes nothing."""

    save_plans: bool = True
    """Whether `run_dir` also gets every executed plan (some KB each), which a bug report needs."""

    trace_every: Annotated[Index, Field(le=MAX_ITERATIONS)] = 10
    """Iterations between two whose stages are traced into `run_dir`, doubling as a run grows; 0
    traces none.
    """

    max_process_groups: Annotated[Count, Field(le=MAX_GROUPS)] | None = None
    """Process groups that all strategies together may need; each costs communicator memory on its
    ranks. Without it 256, on more than 64 devices 4 for each device.
    """

    link: LinkConfig = LinkConfig()
    """Transfer of slices and gradients."""

    planner: PlannerConfig = PlannerConfig()
    """Work that goes into a plan."""

    profiling: ProfilingConfig = ProfilingConfig()
    """Measurement of the machine when `profile` is null."""

    faults: FaultsConfig = FaultsConfig()
    """Reaction to a rank that is lost or told to stop."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Writing of checkpoints."""

    @classmethod
    def parse(cls, section: object) -> HydraConfig:
        """The validated section; raises HydraConfigError listing every problem with its key and
        value.
        """
        if not isinstance(section, Mapping):
            raise HydraConfigError(
                f'"hydra" is {show(section)}, expected an object, at least {SMALLEST_SECTION}'
            )
        plain = plain_json(section, "hydra")
        problems = dict.fromkeys(find_auto(plain), AUTO_REFUSED)
        problems.pop(("attention",), None)  # where it is a word of ours
        config = None
        try:
            config = cls.model_validate(plain)
        except ValidationError as error:
            for details in error.errors():
                problems.setdefault(details["loc"], explain(details))
        if config is not None and max(config.profiling.lengths or (0,)) > config.context_length:
            problems["profiling", "lengths"] = (
                f"is {list(config.profiling.lengths or ())}, expected lengths up to hydra.context_length, "
                f"{config.context_length}"
            )
        if config is None or problems:
            told = [f"{_dotted(location)} {text}" for location, text in problems.items()]
            raise HydraConfigError(join_problems('the "hydra" section', told))
        return config

    @property
    def forward_fraction(self) -> float:
        """Share of a pass that is its forward: backward takes twice as long, and recomputes the
        forward first under activation checkpointing.
        """
        return 1 / 4 if self.activation_checkpointing else 1 / 3

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that two sections share only if every key is equal, written or
        default.
        """
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


_SECTIONS: Mapping[Location, type[BaseModel]] = {
    (): HydraConfig,
    **{
        (name,): type(field.default)
        for name, field in HydraConfig.model_fields.items()
        if isinstance(field.default, _Section)
    },
}
"""The models of the section and of those in it, by where they are."""

SMALLEST_SECTION = '"hydra": {"context_length": 4096, "tokens_per_iteration": 65536}'
"""Example that errors show where they have to say how a section looks."""

Location: TypeAlias = tuple[int | str, ...]

REMOVED = (
    *each(
        "planner.dispatch planner.objective planner.num_trials planner.gap_tolerance planner.time_limit_ms "
        "planner.deadline_ms planner.drift_threshold planner.lookahead profiling.warmup link.keep_frozen",
        "one value serves everybody; leave the key out",
    ),
    Refusal(
        "link.routes", "a slice enters a node once and spreads there; where every rank shall read for itself, set "
        "hydra.link.devices_per_node to 1",
    ),
    Refusal(
        "moe", "routers' biases stay as they are, and the model says whether it has a loss of balance; leave that out "
        "by model.config.output_router_logits = False",
    ),
    Refusal("tp_sequence_parallel", "TP is sequence-parallel wherever the model allows it; leave the key out"),
    Refusal(
        "link.repull_layers",
        "layers are gathered instead; say so for each scheme in hydra.strategies, as in <1,1;gather>",
    ),
    Refusal(
        "link.gradient_dtype", 'DeepSpeed\'s own says it, outside of "hydra"; write "communication_data_type": "fp32" '
        'or "bf16" (as without it, where training is bf16)',
    ),
)  # fmt: skip
"""Removed keys, which are named in whatever section they are written."""

_RENAMED: Mapping[Location, Mapping[str, str]] = {
    ("planner", "space"): {"wide": "full"},
    ("attention",): {"varlen_fa3": "flash_attention_3", "varlen_fa4": "flash_attention_4"},
}
"""New names of values of earlier versions, by key."""

AUTO_REFUSED = (
    'is "auto", which the Trainer fills in for DeepSpeed\'s keys only; leave the key out to get its default, '
    "or write the value"
)


def find_auto(section: Mapping[Any, Any], location: Location = ()) -> Iterator[Location]:
    """Locations of values that are "auto"."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from find_auto(value, (*location, key))
        elif value == "auto":
            yield (*location, key)


def explain(details: ErrorDetails) -> str:
    """Describe the error at one location, and a right value."""
    location = details["loc"]
    if details["type"] == "extra_forbidden":
        return _explain_unknown(location)
    if details["type"] == "missing":
        return f"is missing and has no default; the smallest section is {SMALLEST_SECTION}"
    renamed = _RENAMED.get(tuple(location), {}).get(
        details["input"] if isinstance(details["input"], str) else ""
    )
    if renamed:
        return f"is {show(details['input'])}: it is called {show(renamed)} now"
    if details["type"] == "value_error":
        return f"is {show(details['input'])}: {details['ctx']['error']}"
    if details["type"] == "model_type":
        return f"is {show(details['input'])}: it should be an object"
    wanted = re.sub("^(Input|Value|Tuple|List|String) should", "it should", details["msg"])
    return f"is {show(details['input'])}: {wanted}"


def _explain_unknown(location: Location) -> str:
    """The nearest known key, or where the key belongs, or all keys of that section."""
    *path, key = location
    for row in REMOVED:
        if key == row.name.split(".")[-1]:
            return f"is no longer a key; {row.text}"
    known = list(_SECTIONS[tuple(path)].model_fields)
    nearest = get_close_matches(str(key), known, n=1, cutoff=0.6)
    if nearest:
        return f"is not a key; did you mean {_dotted((*path, nearest[0]))}?"
    for home, section in _SECTIONS.items():
        if str(key) in section.model_fields:
            return f"is not a key here; write {_dotted((*home, key))}"
    return f"is not a key; {_dotted(path)} has {', '.join(known)}"


def _dotted(location: Location | list[int | str]) -> str:
    return ".".join(["hydra", *map(str, location)])


def show(value: object) -> str:
    """The value as JSON, shortened to a line."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def join_problems(where: str, problems: Sequence[str]) -> str:
    """All problems as the text of one error."""
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join([f"{where} has {len(problems)} problems:", *problems])
