"""Parallel strategies: schemes <TP,PP> and their options, their notation (`<sp2,4,1;ckpt=2>`),
their multiset, the ranks of each pipeline, and the changes that uneven stages and checkpointed
layers make in the layers of a stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

from ds_hydra.configs.files import MAX_DEVICES, read_counts
from ds_hydra.errors import HydraConfigError

_DEGREES = re.compile(
    r"\s*(?:sp\s*(\d{1,9})\s*,\s*)?(?:cp\s*(\d{1,9})\s*,\s*(?:sp\s*(\d{1,9})\s*,\s*)?)?"
    r"(?:(\d{1,9})\s*,\s*)?(\d{1,9})\s*"
)
_OPTION = re.compile(r"\s*([a-z_]{1,20})\s*(?:=\s*(\d{1,9}(?:\s*,\s*\d{1,9})*)\s*)?")
_COUNTED = ("ckpt", "stages", "ep")
_FLAGS = ("gather", "hpz", "offload")

MAX_LAYERS = 1 << 20
"""Layers that an option of a scheme may name: far above any model."""

FORM = (
    "write terms like '2x<4,1>' (count x <TP,PP>) joined by '+'; a scheme may have options, as in "
    "'<2,4;ckpt=12;stages=9,8,8,7>', '<sp2,4,1>' (<SP,TP,PP>), '<cp2,1>' (<CP,PP>), '<cp8,sp2,1>', "
    "'<1,1;gather>', '<1,1;hpz>' or '<sp4,1;ep=4>' (experts)"
)


def read_notation(body: str) -> dict[str, Any]:
    """Fields of the scheme whose text is `body` between angle brackets; raises HydraConfigError."""
    first, *rest = body.split(";")
    shown = repr(f"<{body[:80]}>")
    degrees = _DEGREES.fullmatch(first)
    if degrees is None or not (degrees[1] or degrees[2] or degrees[4]):
        raise HydraConfigError(f"cannot read {shown}; {FORM}")
    if degrees[1] and degrees[3]:
        raise HydraConfigError(f"scheme {shown} says sp twice; say it once")
    options: dict[str, tuple[int, ...]] = {}
    flags: dict[str, bool] = {}
    for text in rest:
        match = _OPTION.fullmatch(text)
        name, counts = match.groups() if match is not None else (text.strip(), None)
        if name not in (_COUNTED if counts else _FLAGS):
            raise HydraConfigError(
                f"scheme {shown}: cannot read {text.strip()[:80]!r}; its options are "
                f"{', '.join((*_COUNTED, *_FLAGS))}, as in '<2,4;ckpt=12;stages=9,8,8,7>'"
            )
        if name in options or name in flags:
            raise HydraConfigError(f"scheme {shown} says {name} twice; say it once")
        if counts:
            options[name] = tuple(map(int, counts.split(",")))
        else:
            flags[name] = True
    if "hpz" in flags:
        flags["gather"] = True
    if "offload" in flags and "ckpt" not in options:
        raise HydraConfigError(
            f"scheme {shown}: offload is for checkpointed layers; say how many, as in ckpt=8;offload"
        )
    stages = options.pop("stages", ())
    for option, counts in options.items():
        if len(counts) != 1 or counts[0] < 1:
            raise HydraConfigError(
                f"scheme {shown}: {option} is {','.join(map(str, counts))[:80]}, expected one number "
                "from 1 up; leave it out for none"
            )
    return {
        "tp": int(degrees[4] or 1),
        "pp": int(degrees[5]),
        "stages": stages,
        "sp": int(degrees[1] or degrees[3] or 1),
        "cp": int(degrees[2] or 1),
        "context_first": bool(degrees[3]),
        **flags,
        **{option: counts[0] for option, counts in options.items()},
    }


_TERM = re.compile(r"\s*(?:(\d{1,9})\s*x\s*)?<([^<>]*)>\s*")
_THEN = re.compile(r"\sthen\s")  # further blanks belong to the terms
MAX_PHASES = 256
"""Phases that one iteration may have."""
MAX_CHARACTERS = 600_000
"""Maximum length of a strategy's text: a scheme that names the layers of all stages."""
MAX_PIPELINES = 4 * MAX_DEVICES
"""Pipelines of all phases of a strategy, or of all candidates: few enough to list in a second."""


@dataclass(frozen=True, slots=True, order=True)
class Scheme:
    """The parallel scheme <TP,PP> of one pipeline: `pp` stages of `tp` ranks each; and its
    options.

    Text forms: `<2,4>`, `<2,4;ckpt=12;stages=9,8,8,7>`, `<sp2,4,1>` (SP 2, TP 4,
    PP 1), `<sp4,1>` (SP 4, TP 1, PP 1), `<cp2,1>`, `<sp4,cp2,1>`,
    `<cp2,sp4,1>` (`context_first`), `<sp4,1;gather>`, `<sp4,1;hpz>`, `<sp4,1;ep=4>`.
    In JSON documents the options are further keys beside "tp" and "pp", where they are set.
    """

    tp: int
    pp: int
    stages: tuple[int, ...] = ()
    """Decoder layers of each stage; empty for an even split, whose first stages take the rest."""
    ckpt: int = 0
    """The model's first layers that keep only their input and run forward again in backward (early
    stages hold more micro-batches, so they save most); 0 leaves it to the model's own gradient
    checkpointing."""
    sp: int = 1
    """Sequence-parallel degree: so many ranks share a row by heads in attention."""
    gather: bool = False
    """All ranks gather each layer for every pass, as ZeRO-3 does, and give its gradient away at
    once: two layers are with a rank, and pipelines run their micro-batches in lockstep. For PP 1,
    and for all pipelines of a strategy or none.
    """
    ep: int = 1
    """Expert-parallel degree: `ep` neighbours of a stage's SP x TP group share the experts of a
    layer, whole ones, and send them their tokens.
    """
    cp: int = 1
    """Context-parallel degree: a micro-batch is cut into `cp` rows of pieces of its sequences, and
    a stage has `cp * sp * tp` ranks.
    """
    context_first: bool = False
    """Whether ranks of a CP group are neighbours in a stage, so that of several nodes SP connects
    the nodes. Else those of an SP group are (context-first and head-first placement of LoongTrain,
    arXiv:2406.18485). False where either degree is 1.
    """
    hpz: bool = False
    """Whether weights of gathered layers that have crossed between nodes stay on the node until the
    end of the iteration, cut over its ranks (hpZ of ZeRO++, arXiv:2306.10209), so that they cross
    once.
    """
    offload: bool = False
    """Whether checkpointed layers keep their input, and what attention returns, in the host's
    memory until backward. False where none is checkpointed.
    """
    _hash: int = field(init=False, repr=False, compare=False)
    """Schemes are looked up often."""

    def __post_init__(self) -> None:
        degrees = {"SP": self.sp, "CP": self.cp, "TP": self.tp, "PP": self.pp}
        if min(degrees.values()) < 1:
            named = [k for k, n in degrees.items() if n != 1 or k in ("TP", "PP")]
            shown = ",".join(f"{k.lower() if k in ('SP', 'CP') else ''}{degrees[k]}" for k in named)
            sizes = f"{', '.join(named[:-1])} and PP degrees"
            raise HydraConfigError(f"scheme <{shown:.78}>: {sizes} must be 1 or more")
        self._check_ep()
        if not 0 <= self.ckpt <= MAX_LAYERS:
            raise HydraConfigError(
                f"ckpt of a scheme is {self.ckpt}, expected a number of layers up to {MAX_LAYERS}"
            )
        if self.stages and min(self.stages) < 1:
            raise HydraConfigError(
                f"stages of a scheme are {self.stages!r:.80}, expected 1 layer or more for each of {self.pp} stages"
            )
        if self.num_devices > MAX_DEVICES:
            raise HydraConfigError(f"scheme {str(self)[:80]}: more than {MAX_DEVICES} ranks")
        if self.stages and len(self.stages) != self.pp:
            raise HydraConfigError(
                f"scheme {str(self)[:80]} has {len(self.stages)} numbers of layers for PP {self.pp}; give one per stage"
            )
        if self.gather and self.pp > 1:
            raise HydraConfigError(
                f"scheme {str(self)[:80]}: gather is for all layers of schemes of PP 1"
            )
        if self.hpz and not self.gather:
            raise HydraConfigError(
                f"scheme {str(self)[:80]}: hpz is for layers that are gathered; give gather, too, or leave hpz out"
            )
        if self.hpz and self.ep > 1:
            raise HydraConfigError(
                f"scheme {str(self)[:80]}: hpz keeps what all ranks of a node need, and ranks share experts; "
                "write ;gather in place of ;hpz, or leave ep out"
            )
        self._check_order()
        if not self.ckpt:
            object.__setattr__(self, "offload", False)
        degrees_and_options = (
            self.tp, self.pp, self.stages, self.ckpt, self.sp, self.gather, self.ep, self.cp, self.context_first,
            self.hpz, self.offload,
        )  # fmt: skip
        object.__setattr__(self, "_hash", hash(degrees_and_options))

    def _check_ep(self) -> None:
        size = self.sp * self.tp
        if self.ep < 1 or size % self.ep:
            plain = str(Scheme(self.tp, self.pp, sp=self.sp))[:-1]
            like = f"{plain};ep={size}>" if size > 1 else f"<sp2,{self.pp};ep=2>"
            raise HydraConfigError(
                f"ep of a scheme with SP {self.sp} x TP {self.tp} is {self.ep}, expected a divisor of "
                f"{size}; experts are shared inside a stage's SP x TP group, as in '{like}'"
            )

    def _check_order(self) -> None:
        if self.sp == 1 or self.cp == 1:  # there is one order
            object.__setattr__(self, "context_first", False)
        if self.context_first and self.ep > 1:
            plain = f"sp{self.sp},cp{self.cp}"
            raise HydraConfigError(
                f"a scheme of CP {self.cp} and SP {self.sp}, whose CP ranks are neighbours, has ep={self.ep}; experts "
                f"are shared by neighbours of an SP x TP group: write <{plain},...;ep={self.ep}>"
            )

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """The scheme written as `text`; raises HydraConfigError with the expected form."""
        _check_text(text)
        match = _TERM.fullmatch(text)
        if match is None or match[1] is not None:
            raise HydraConfigError(f"cannot read scheme {text[:80]!r}; {FORM}")
        return Scheme(**read_notation(match[2]))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Scheme:
        """The scheme in a document with the keys of `to_json` among others.

        Raises KeyError without "tp" or "pp", HydraConfigError for values that are no scheme.
        """
        options = {key: document[key] for key in _DEFAULTS if key in document}
        if options.get("hpz") is True:
            options["gather"] = True
        options |= {"tp": document["tp"], "pp": document["pp"]}
        for name, value in options.items():
            kind = type(_DEFAULTS.get(name, 1))
            if type(value) is not kind:
                wanted = {bool: "true or false", int: "a whole number", list: "layer counts"}
                raise HydraConfigError(
                    f"{name} of a scheme is {value!r:.80}, expected {wanted[kind]}"
                )
        if "stages" in options:
            options["stages"] = read_counts(document, "stages", least=1, most=MAX_LAYERS)
        return cls(**options)

    def to_json(self) -> dict[str, Any]:
        """ "tp" and "pp", and the options that are set.

        >>> Scheme(2, 1).to_json(), Scheme(1, 2, stages=(3, 1)).to_json()
        ({'tp': 2, 'pp': 1}, {'tp': 1, 'pp': 2, 'stages': [3, 1]})
        """
        options = {name: getattr(self, name) for name in _DEFAULTS}
        options["stages"] = list(self.stages)
        given = {name: value for name, value in options.items() if value != _DEFAULTS[name]}
        return {"tp": self.tp, "pp": self.pp, **given}

    @property
    def num_devices(self) -> int:
        """Ranks that one pipeline of this scheme occupies (N(P) in §7)."""
        return self.sp * self.cp * self.tp * self.pp

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that share the micro-batches of one stage."""
        return self.sp * self.cp * self.tp

    @property
    def num_shards(self) -> int:
        """Sequence shards that a micro-batch is cut into, by SP and CP."""
        return self.sp * self.cp

    @property
    def sp_step(self) -> int:
        """Distance from a rank of an SP group to the next one."""
        return self.tp * (self.cp if self.context_first else 1)

    @property
    def cp_step(self) -> int:
        """Distance from a rank of a CP group to the next one."""
        return self.tp * (1 if self.context_first else self.sp)

    @property
    def gathering(self) -> tuple[bool, bool]:
        """Whether layers are gathered, and whether they stay on the node: the same in all pipelines
        of a strategy.
        """
        return self.gather, self.hpz

    @property
    def crossing(self) -> Scheme:
        """The scheme itself, of which nothing stays on the node."""
        return replace(self, hpz=False) if self.hpz else self

    @property
    def staying(self) -> Scheme:
        """The scheme with gathered weights that stay on the node; itself where none can."""
        can_stay = self.gather and self.ep == 1
        return replace(self, hpz=True) if can_stay else self

    @property
    def is_plain(self) -> bool:
        """Whether it is <TP,PP> and nothing more."""
        has_options = self.stages or self.ckpt or self.gather
        return not has_options and self.num_shards == 1

    def keeps_attention(self, num_layers: int) -> bool:
        """Whether attention of checkpointed layers does not run again. Where all of `num_layers`
        are checkpointed memory is what counts: only the host's is used for that.
        """
        return self.offload or self.ckpt < num_layers

    def without_options(self) -> Scheme:
        """The same degrees with even stages and nothing checkpointed or gathered."""
        return replace(self, stages=(), ckpt=0, gather=False, hpz=False)

    def stage_layers(self, num_layers: int, stage: int) -> range:
        """The layers of `stage`; in an even split that leaves layers over, earlier stages get one
        more.
        """
        if self.stages:
            begin = sum(self.stages[:stage])
            return range(begin, begin + self.stages[stage])
        base, extra = divmod(num_layers, self.pp)
        begin = stage * base + min(stage, extra)
        return range(begin, begin + base + (stage < extra))

    def check_layers(self, num_layers: int) -> None:
        """Raise HydraConfigError where a model of `num_layers` cannot run under this scheme."""
        if self.pp > num_layers:
            raise HydraConfigError(
                f"scheme {self}: PP {self.pp} is above the model's {num_layers} layers; "
                f"use PP {num_layers} or less in hydra.strategies"
            )
        if self.stages and sum(self.stages) != num_layers:
            raise HydraConfigError(
                f"scheme {self}: its stages have {sum(self.stages)} layers, the model has {num_layers}; "
                f"make them sum to {num_layers} in hydra.strategies"
            )
        if self.ckpt > num_layers:
            raise HydraConfigError(
                f"scheme {self}: ckpt={self.ckpt} is above the model's {num_layers} layers; "
                f"use ckpt={num_layers} or less in hydra.strategies"
            )

    def __str__(self) -> str:
        sp = f"sp{self.sp}," if self.sp > 1 else ""
        cp = f"cp{self.cp}," if self.cp > 1 else ""
        tp = f"{self.tp}," if self.tp > 1 or not (sp or cp) else ""
        degrees = f"{cp}{sp}{tp}{self.pp}" if self.context_first else f"{sp}{cp}{tp}{self.pp}"
        ckpt = f";ckpt={self.ckpt}{';offload' * self.offload}" if self.ckpt else ""
        stages = f";stages={','.join(map(str, self.stages))}" if self.stages else ""
        gathers = ";hpz" if self.hpz else ";gather" if self.gather else ""
        ep = f";ep={self.ep}" if self.ep > 1 else ""
        return f"<{degrees}{ep}{ckpt}{stages}{gathers}>"


_DEFAULTS = {
    "sp": 1, "cp": 1, "context_first": False, "ep": 1, "ckpt": 0, "stages": [], "gather": False, "hpz": False,
    "offload": False,
}  # fmt: skip
"""Default values of the options, as documents have them."""


def _placement_order(scheme: Scheme) -> tuple[Any, ...]:
    # Options decide last: equal multisets have to be equal values.
    return (-scheme.ranks_per_stage, -scheme.tp, -scheme.pp, scheme)


@dataclass(frozen=True, slots=True)
class Strategy:
    """The multiset of schemes of all pipelines, e.g. `1x<8,2> + 4x<4,1>`.

    `schemes` is kept in placement order (larger stages first, then larger TP, then larger PP), so
    equal multisets are equal values and TP groups start at multiples of their size when degrees are
    powers of two.

    A planner may put several together, which run one after another, each on ranks from 0 on, its
    *phases* (`Strategy.of_phases`): `1x<sp4,1;gather> then 4x<1,1;gather>`. `schemes` are then
    those of all phases, in their order.
    """

    schemes: tuple[Scheme, ...]
    phases: tuple[Strategy, ...] = field(default=(), repr=False)
    """Phases of a strategy of several; empty for one, which is the strategy itself."""
    _hash: int = field(init=False, repr=False, compare=False)
    """Hash of `schemes`, which are many: strategies are looked up often."""

    def __post_init__(self) -> None:
        if self.phases:
            object.__setattr__(self, "_hash", hash(self.phases))
            return
        if not self.schemes:
            raise HydraConfigError("a strategy needs at least one pipeline, e.g. '1x<1,1>'")
        for option in ("gather", "hpz"):
            if len({getattr(scheme, option) for scheme in self.schemes}) > 1:
                raise HydraConfigError(
                    f"a strategy has pipelines with and without {option}; layers are gathered by all ranks at once, "
                    "so give it to all pipelines or none"
                )
        runs = sorted(_runs(self.schemes), key=lambda run: _placement_order(run[0]))
        object.__setattr__(
            self, "schemes", tuple(scheme for scheme, count in runs for _ in range(count))
        )
        object.__setattr__(self, "_hash", hash(tuple(_runs(self.schemes))))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def alike(cls, scheme: Scheme, num_devices: int) -> Strategy:
        """The strategy with as many pipelines of `scheme` as `num_devices` have room for; those
        left are idle.

        >>> str(Strategy.alike(Scheme(4, 1), 10))
        '2x<4,1>'
        """
        return cls((scheme,) * (num_devices // scheme.num_devices))

    @classmethod
    def of_phases(cls, phases: Sequence[Strategy]) -> Strategy:
        """`phases` one after another; of one phase that strategy itself."""
        if len(phases) == 1:
            return phases[0]
        return cls(tuple(s for phase in phases for s in phase.schemes), tuple(phases))

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """The strategy written as `text`; raises HydraConfigError with the expected form.

        >>> str(Strategy.parse("4x<1,1> + <2,2; stages=3,1>"))
        '1x<2,2;stages=3,1> + 4x<1,1>'
        """
        _check_text(text)
        parts = _THEN.split(text, MAX_PHASES)
        if len(parts) > MAX_PHASES:
            raise HydraConfigError(f"strategy {text[:80]!r} has more than {MAX_PHASES} phases")
        if len(parts) > 1:
            return cls.of_phases(_parse_each(parts))
        schemes: list[Scheme] = []
        num_devices = 0
        for term in text.split("+"):
            match = _TERM.fullmatch(term)
            if match is None or match[1] == "0":
                raise HydraConfigError(
                    f"strategy {text[:80]!r}: cannot read {term.strip()[:80]!r}; {FORM}"
                )
            scheme, count = Scheme(**read_notation(match[2])), int(match[1] or 1)
            num_devices += count * scheme.num_devices
            if num_devices > MAX_DEVICES:
                raise HydraConfigError(
                    f"strategy {text[:80]!r} names more than {MAX_DEVICES} ranks"
                )
            schemes += [scheme] * count
        return cls(tuple(schemes))

    @property
    def num_devices(self) -> int:
        """Ranks that all pipelines of a phase together occupy, the widest of them."""
        if self.phases:
            return max(phase.num_devices for phase in self.phases)
        return sum(scheme.num_devices for scheme in self.schemes)

    @property
    def in_turn(self) -> tuple[Strategy, ...]:
        """Strategies that run one after another: the phases, or itself."""
        return self.phases or (self,)

    @property
    def gathers(self) -> bool:
        """Whether its pipelines gather their layers for every pass."""
        return self.schemes[0].gather

    @property
    def keeps_on_nodes(self) -> bool:
        """Whether weights that it has gathered from other nodes stay on the node (`hpz`)."""
        return self.schemes[0].hpz

    @property
    def crossing(self) -> Strategy:
        """The strategy itself, of which nothing stays on the node."""
        if not self.keeps_on_nodes:
            return self
        of_kind = {scheme: scheme.crossing for scheme in dict.fromkeys(self.schemes)}
        return Strategy(tuple(of_kind[scheme] for scheme in self.schemes))

    @property
    def is_heterogeneous(self) -> bool:
        """Whether two pipelines have different schemes."""
        return len(set(self.schemes)) > 1

    def place(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each pipeline, in the order of `schemes`: `blocks`.

        Inside a pipeline rank `ranks[((stage * cp + c) * sp + s) * tp + t]` runs TP slice `t` of
        `stage` on sequence shard `s` of row `c` of every micro-batch (with `context_first` rank
        `ranks[((stage * sp + s) * cp + c) * tp + t]`). Ranks from `num_devices` on are in no
        pipeline (idle during propagation).

        >>> Strategy.parse("1x<2,1> + 2x<1,1>").place()
        ((0, 1), (2,), (3,))
        """
        if self.phases:
            return tuple(block for phase in self.phases for block in phase.place())
        return tuple(map(tuple, self.blocks))

    @property
    def blocks(self) -> tuple[range, ...]:
        """Consecutive ranks of each pipeline of a phase, one after another from rank 0 on.

        >>> Strategy.parse("1x<2,1> + 2x<1,1>").blocks
        (range(0, 2), range(2, 3), range(3, 4))
        """
        return _blocks(self)

    def __str__(self) -> str:
        if self.phases:
            return " then ".join(map(str, self.phases))
        return " + ".join(f"{count}x{scheme}" for scheme, count in _runs(self.schemes))


@lru_cache(maxsize=4096)
def _blocks(strategy: Strategy) -> tuple[range, ...]:
    sizes = [scheme.num_devices for scheme in strategy.schemes]
    return tuple(range(end - size, end) for end, size in zip(accumulate(sizes), sizes))


def _runs(schemes: Iterable[Scheme]) -> list[tuple[Scheme, int]]:
    """Neighbours that are equal, as one scheme and their number."""
    return [(scheme, sum(1 for _ in run)) for scheme, run in groupby(schemes)]


def schemes_of(strategies: Iterable[Strategy]) -> set[Scheme]:
    """All schemes of `strategies`."""
    return {scheme for strategy in strategies for scheme in strategy.schemes}


def parse_strategies(texts: Iterable[str]) -> tuple[Strategy, ...]:
    """The strategies written as `texts`, duplicates removed, first occurrence kept. Raises
    HydraConfigError for phases, which the planner alone puts together.
    """
    found = tuple(dict.fromkeys(_parse_each(texts)))
    for strategy in found:
        check_one_phase(strategy)
    return found


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise HydraConfigError(f"a strategy is {text!r:.80}, expected text; {FORM}")
    if len(text) > MAX_CHARACTERS:
        raise HydraConfigError(
            f"strategy {text[:80]!r} has {len(text)} characters, {MAX_CHARACTERS} are the most; {FORM}"
        )


def _parse_each(texts: Iterable[str]) -> list[Strategy]:
    """The strategies written as `texts`; raises HydraConfigError for more than `MAX_PIPELINES`."""
    found: list[Strategy] = []
    num_pipelines = 0
    for text in texts:
        found.append(Strategy.parse(text))
        num_pipelines += len(found[-1].schemes)
        if num_pipelines > MAX_PIPELINES:
            raise HydraConfigError(
                f"{len(found)} strategies have {num_pipelines} pipelines together, up to {text[:80]!r}; "
                f"{MAX_PIPELINES} are the most"
            )
    return found


def check_one_phase(strategy: Strategy) -> None:
    """Raise HydraConfigError for a strategy of several phases."""
    if strategy.phases:
        raise HydraConfigError(
            f"strategy {str(strategy)[:80]!r} has {len(strategy.phases)} phases, which the planner puts together for "
            f"each global batch; list each in hydra.strategies by itself: '{strategy.phases[0]}', ..."
        )


FORWARD_FRACTION = 1 / 3
"""Part of forward and backward that is the forward, which but for attention runs again for a
checkpointed layer: backward takes two.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """Layers that one stage holds in the worst moment of 1F1B."""

    num_layers: int
    num_checkpointed: int
    micro_batches_in_flight: int
    """Micro-batches whose forward is done and whose backward is not."""
    is_last: bool

    @property
    def work(self) -> float:
        """Time of one micro-batch without attention, in forwards and backwards of a layer; a
        checkpointed one also runs forward again.
        """
        return self.num_layers + self.num_checkpointed * FORWARD_FRACTION


def stage_layers(scheme: Scheme, num_layers: int) -> list[StageLayers]:
    """The stages of `scheme` on a model of `num_layers`; raises HydraConfigError where they do not
    fit.

    >>> [stage.work for stage in stage_layers(Scheme(1, 2, stages=(5, 3), ckpt=6), 8)]
    [6.666666666666666, 3.3333333333333335]
    """
    scheme.check_layers(num_layers)
    layers = [scheme.stage_layers(num_layers, stage) for stage in range(scheme.pp)]
    return [
        StageLayers(
            num_layers=len(own),
            num_checkpointed=len(range(own.start, min(own.stop, scheme.ckpt))),
            micro_batches_in_flight=scheme.pp - stage,
            is_last=stage == scheme.pp - 1,
        )
        for stage, own in enumerate(layers)
    ]


def slowest_stage_ratios(scheme: Scheme, num_layers: int) -> tuple[float, float]:
    """T of `scheme` over T of the same degrees without options, by the layers of the slowest stage:
    of all but attention, and of attention.

    T is that of a stage of ceil(L / PP) layers; its share of embedding and head grows with the
    layers as T does.

    Attention runs again where all layers are checkpointed and keep their input alone.

    >>> [slowest_stage_ratios(Scheme(1, 2, **o), 8) for o in ({"stages": (5, 3)}, {"ckpt": 4})]
    [(1.25, 1.25), (1.3333333333333333, 1.0)]
    >>> [slowest_stage_ratios(Scheme(1, 2, ckpt=8, offload=o), 8)[1] for o in (False, True)]
    [1.3333333333333333, 1.0]
    """
    stages, even = stage_layers(scheme, num_layers), -(-num_layers // scheme.pp)
    work = max(stage.work for stage in stages)
    once = scheme.keeps_attention(num_layers)
    of_attention = max(stage.num_layers for stage in stages) if once else work
    return work / even, of_attention / even
