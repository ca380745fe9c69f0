"""Rows of the parity table: every pair of values of its factors that can meet is in one of them.

Rows of compiled layers stand beside them: they take ten times as long, so they hold every value,
and pairs of those factors alone that change which code a layer runs.

`python tests/parity_rows.py` writes `tests/parity_table.txt`, the same in every run.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

TABLE = Path(__file__).with_name("parity_table.txt")
NUM_RANKS = 4

Row = dict[str, str]
"""A value of each factor."""
Item = tuple[str, str]
"""A factor and its value."""
Pair = tuple[Item, Item]

EXPERTS = (
    "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe", "dots1", "gpt_oss", "ernie4_5_moe", "olmoe",
    "granitemoe",
)  # fmt: skip
DENSE = (
    "llama", "llama_bias", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "granite_swa", "olmo2",
)  # fmt: skip


class Degrees(NamedTuple):
    """Of one pipeline."""

    sp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.sp * self.cp * self.tp * self.pp


KINDS = {
    "dp": Degrees(),
    "tp2": Degrees(tp=2),
    "tp4": Degrees(tp=4),
    "pp2": Degrees(pp=2),
    "pp3": Degrees(pp=3),
    "tp2pp2": Degrees(tp=2, pp=2),
    "sp2": Degrees(sp=2),
    "sp4": Degrees(sp=4),
    "sp2tp2": Degrees(sp=2, tp=2),
    "sp2pp2": Degrees(sp=2, pp=2),
    "cp2": Degrees(cp=2),
    "cp4": Degrees(cp=4),
    "sp2cp2": Degrees(sp=2, cp=2),
    "cp2tp2": Degrees(cp=2, tp=2),
    "cp2pp2": Degrees(cp=2, pp=2),
}

FACTORS: dict[str, tuple[str, ...]] = {
    "family": DENSE + EXPERTS,
    "kind": tuple(KINDS),
    "weights": ("kept", "stream", "gather", "hpz"),
    "layout": ("alike", "idle", "with_dp", "with_tp", "with_pp", "with_sp", "then"),
    "stages": ("even", "uneven"),
    "ckpt": ("no_ckpt", "ckpt", "ckpt_all"),
    "tp_sp": ("whole_rows", "cut_rows"),
    "overlap": ("overlap", "no_overlap"),
    "routes": ("one_node", "nodes_of_2", "nodes_of_3", "direct"),
    "lengths": ("many", "short", "few_labels", "single", "empty_pipeline"),
    "trained": ("all", "tied", "frozen", "lora"),
    "experts": ("no_ep", "ep2", "ep4"),
    "balance": ("no_balance", "balance"),
    "layers": ("interpreted", "compiled"),
}
"""A row is named by its values; those that come first are left out, but for family and kind.

layout: pipelines of one kind on all ranks, ranks without work, pipelines of another kind beside
them, two phases. routes: hydra.link. lengths: see `test_parity_table.LENGTHS_OF`. layers:
hydra.compile_layers.
"""
COMPILED: Item = ("layers", "compiled")
OF_A_LAYER = ("kind", "weights", "ckpt", "tp_sp", "trained", "experts")
"""What changes the code of a layer, whose pairs meet in compiled rows, too."""
ENGINE = ("family", "trained", "balance", "tp_sp", "overlap", "routes", "layers")
"""What an engine is started with, and whether it checkpoints all layers."""

GATHERED = ("gather", "hpz")
WITHOUT_PP = ("olmoe", "granitemoe")
WITHOUT_TP = ("gpt_oss",)
WITH_BALANCE = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")
WHOLE_FEATURES = ("olmo2", "deepseek_v3", "granitemoe", "olmoe")
"""Attention is not cut by heads under TP, or norms see features of all ranks."""


class Rule(NamedTuple):
    """Values of `factors` for which `is_broken` holds cannot meet."""

    factors: tuple[str, ...]
    is_broken: Callable[..., bool]
    reason: str


PARTNERS = {
    "with_dp": KINDS["dp"],
    "with_tp": KINDS["tp2"],
    "with_pp": KINDS["pp2"],
    "with_sp": KINDS["sp2"],
}
"""What stands beside pipelines of another kind."""


def _has_room(kind: str, layout: str) -> bool:
    free = NUM_RANKS - KINDS[kind].num_ranks
    partner = PARTNERS.get(layout)
    if layout == "idle":
        return free > 0 and kind != "pp3"
    return partner is None or free >= partner.num_ranks


def _ep(value: str) -> int:
    return int(value.removeprefix("ep")) if value.startswith("ep") else 1


RULES = (
    Rule(("kind", "weights"), lambda k, w: w in GATHERED and KINDS[k].pp > 1, "gathered layers have no PP"),
    Rule(("layout", "weights"), lambda x, w: w in GATHERED and x == "with_pp", "gathered layers have no PP"),
    Rule(("stages", "weights"), lambda s, w: w in GATHERED and s == "uneven", "gathered layers have no PP"),
    Rule(("kind", "layout"), lambda k, x: not _has_room(k, x), "four ranks have no room for both, or it is 'alike'"),
    Rule(("kind", "layout"), lambda k, x: k != "pp2" and KINDS[k] == PARTNERS.get(x), "that is 'alike'"),
    Rule(("kind", "layout"), lambda k, x: x == "then" and KINDS[k].pp > 1, "phases have no PP"),
    Rule(("stages", "layout"), lambda s, x: s == "uneven" and x == "then", "phases have no PP"),
    Rule(("layout", "weights"), lambda x, w: x == "then" and w == "stream", "phases do not stream"),
    Rule(("kind", "stages"), lambda k, s: s == "uneven" and KINDS[k].pp == 1, "one stage"),
    Rule(("family", "kind"), lambda f, k: f in WITHOUT_PP and KINDS[k].pp > 1, "transformers ships no PP plan"),
    Rule(("family", "layout"), lambda f, x: f in WITHOUT_PP and x == "with_pp", "transformers ships no PP plan"),
    Rule(("family", "stages"), lambda f, s: f in WITHOUT_PP and s == "uneven", "transformers ships no PP plan"),
    Rule(("family", "kind"), lambda f, k: f in WITHOUT_TP and KINDS[k].tp > 1, "transformers ships no TP plan"),
    Rule(("family", "layout"), lambda f, x: f in WITHOUT_TP and x == "with_tp", "transformers ships no TP plan"),
    Rule(("family", "experts"), lambda f, e: e != "no_ep" and f in DENSE, "no experts"),
    Rule(("family", "balance"), lambda f, b: b == "balance" and f not in WITH_BALANCE, "no loss of balance"),
    Rule(
        ("kind", "experts"),
        lambda k, e: KINDS[k].sp * KINDS[k].tp % _ep(e) != 0,
        "experts are shared in a group of SP x TP",
    ),
    Rule(("layout", "experts"), lambda x, e: e == "ep4" and x not in ("alike", "then"), "a group of four is all ranks"),
    Rule(("stages", "experts"), lambda s, e: e == "ep4" and s == "uneven", "a group of four is all ranks"),
    Rule(
        ("family", "tp_sp", "kind"),
        lambda f, t, k: f in WHOLE_FEATURES and t == "cut_rows" and KINDS[k].tp > 1,
        "attention is not cut",
    ),
    Rule(
        ("family", "tp_sp", "layout"),
        lambda f, t, x: f in WHOLE_FEATURES and t == "cut_rows" and x == "with_tp",
        "attention is not cut",
    ),
)  # fmt: skip


def broken_rules(row: Mapping[str, str]) -> list[str]:
    """Why `row`, some of whose factors may have no value yet, cannot be."""
    return [
        rule.reason
        for rule in RULES
        if all(f in row for f in rule.factors) and rule.is_broken(*(row[f] for f in rule.factors))
    ]


def pairs_of(row: Mapping[str, str]) -> list[Pair]:
    """((factor, value), (factor, value)) for each two factors, in the order of `FACTORS`."""
    return list(itertools.combinations([(f, row[f]) for f in FACTORS if f in row], 2))


def all_pairs() -> list[Pair]:
    """Those of all factors but `layers`, whether they can meet or not."""
    factors = [factor for factor in FACTORS if factor != COMPILED[0]]
    return [
        ((f, v), (g, w))
        for f, g in itertools.combinations(factors, 2)
        for v in FACTORS[f]
        for w in FACTORS[g]
    ]


def pairs_of_compiled() -> list[Pair]:
    """Those that rows of compiled layers hold, if they can meet."""
    of_a_layer = [pair for pair in all_pairs() if {f for f, _ in pair} <= {*OF_A_LAYER}]
    items = ((f, v) for f in FACTORS if f != COMPILED[0] for v in FACTORS[f])
    return [*of_a_layer, *((item, COMPILED) for item in items)]


def complete(
    row: Row, factors: Sequence[str], gain: Callable[[Row, Item], float], random: Random
) -> Row | None:
    """`row` with a value for each of `factors` that it lacks, each the one that gains most and lets
    the others have one; None where that cannot be.
    """
    if not factors:
        return row
    factor, *others = factors
    if factor in row:
        return None if broken_rules(row) else complete(row, others, gain, random)
    values = sorted(FACTORS[factor], key=lambda v: (-gain(row, (factor, v)), random.random()))
    for value in values:
        larger = {**row, factor: value}
        if not broken_rules(larger):
            found = complete(larger, others, gain, random)
            if found is not None:
                return found
    return None


def generate(seed: int = 0) -> list[Row]:
    """Rows that hold every pair that can meet, then those of compiled layers."""
    rows = [
        *cover(all_pairs(), ("layers", "interpreted"), seed),
        *cover(pairs_of_compiled(), COMPILED, seed),
    ]
    by = ("layers", *ENGINE, "ckpt", *FACTORS)
    return sorted(rows, key=lambda row: [FACTORS[f].index(row[f]) for f in by])


def cover(pairs: Iterable[Pair], of_all: Item, seed: int) -> list[Row]:
    """Rows with the item `of_all` that hold those of `pairs` that can meet, greedily: each holds as
    many new ones as it can, under an engine that there is already where one can take the next pair
    (rows of compiled layers under engines of their own).
    """
    random = Random(seed)
    open_pairs = {pair for pair in pairs if not broken_rules(dict(pair))}
    num_open: Counter[Item] = Counter()
    order = {factor: number for number, factor in enumerate(FACTORS)}
    rows: list[Row] = []
    engines: dict[tuple[str, ...], Row] = {}
    factors = [factor for factor in FACTORS if factor != of_all[0]]

    def gain(row: Row, item: Item) -> float:
        pairs = (sorted((item, other), key=lambda i: order[i[0]]) for other in row.items())
        return sum(tuple(pair) in open_pairs for pair in pairs) + 1e-3 * num_open[item]

    def num_new(row: Row) -> int:
        return sum(pair in open_pairs for pair in pairs_of(row))

    while open_pairs:
        num_open = Counter(item for pair in open_pairs for item in pair)
        wanted = min(open_pairs, key=lambda pair: (-num_open[pair[0]] - num_open[pair[1]], pair))
        begins = [{**engine, **dict(wanted)} for engine in engines.values() if has(engine, wanted)]
        random.shuffle(begins)
        found = [
            row
            for begin in begins[:8]
            for _ in range(4)
            if (row := complete(begin, shuffled(factors, random), gain, random))
        ]
        if not found:
            begin = dict([of_all, *wanted])
            found = [complete(begin, shuffled(factors, random), gain, random)]
            assert found[0], f"{wanted}: say in RULES why these cannot meet"
        row = max(found, key=num_new)
        engine = {f: v for f, v in row.items() if f in ENGINE or v == "ckpt_all"}
        if of_all != COMPILED:  # to compile takes longer than an engine's start
            engines.setdefault(engine_of(row), engine)
        rows.append(row)
        open_pairs.difference_update(pairs_of(row))
    return rows


def has(engine: Row, pair: Pair) -> bool:
    """Whether a row under `engine` can have `pair`, as far as the engine goes."""
    return all(engine.get(factor, value) == value for factor, value in pair)


def shuffled(factors: Iterable[str], random: Random) -> list[str]:
    """`factors` in another order."""
    return random.sample([*factors], len([*factors]))


def engine_of(row: Row) -> tuple[str, ...]:
    """Equal for rows that one engine can run."""
    return (*(row[f] for f in ENGINE), str(row["ckpt"] == "ckpt_all"))


def name_of(row: Row) -> str:
    """`gemma2.tp2.stream.with_pp.short`."""
    values = [row["family"], row["kind"]]
    values += [row[f] for f in FACTORS if f not in ("family", "kind") and row[f] != FACTORS[f][0]]
    return ".".join(values)


def row_of(name: str) -> Row:
    """The row of that name."""
    factor_of = {value: factor for factor, values in FACTORS.items() for value in values}
    named = {factor_of[value]: value for value in name.split(".")}
    return {factor: named.get(factor, values[0]) for factor, values in FACTORS.items()}


def _scheme(degrees: Degrees, options: Sequence[str], *, context_first: bool = False) -> str:
    names = [f"sp{degrees.sp}"] if degrees.sp > 1 else []
    names += [f"cp{degrees.cp}"] if degrees.cp > 1 else []
    names = names[::-1] if context_first else names
    return f"<{','.join([*names, str(degrees.tp), str(degrees.pp)])}{''.join(f';{o}' for o in options)}>"


def strategy_of(row: Row) -> str:
    """The strategy of a row, on four ranks."""
    degrees = KINDS[row["kind"]]
    where = [row["weights"]] if row["weights"] != "kept" else []
    experts = [f"ep={_ep(row['experts'])}"] if row["experts"] != "no_ep" else []
    options = list(experts)
    if row["ckpt"] == "ckpt":
        options.append("ckpt=2")
    if row["stages"] == "uneven":
        options.append({2: "stages=3,1", 3: "stages=1,2,1"}[degrees.pp])
    # Half of the rows of both degrees; a kind of its own would be 34 rows more
    context_first = row["overlap"] == "no_overlap" and not experts
    own = _scheme(degrees, [*options, *where], context_first=context_first)
    num_alike = NUM_RANKS // degrees.num_ranks
    partner = PARTNERS.get(row["layout"])
    if row["layout"] == "idle":
        return f"{1 if degrees.num_ranks > 1 else 3}x{own}"
    if row["layout"] == "then":
        ckpt = ["ckpt=1"] if row["ckpt"] != "ckpt_all" else []
        later = degrees if experts else Degrees(tp=degrees.tp)
        second = _scheme(later, [*experts, *ckpt, *where])
        return f"{num_alike}x{own} then {NUM_RANKS // later.num_ranks}x{second}"
    if partner is None:
        return f"{num_alike}x{own}"
    # Beside streamed layers others stay, or stream as well.
    is_alike = row["weights"] in GATHERED or row["layout"] in ("with_dp", "with_sp")
    num_own = 2 if row["kind"] == "dp" else 1
    num_others = (NUM_RANKS - num_own * degrees.num_ranks) // partner.num_ranks
    return f"{num_own}x{own} + {num_others}x{_scheme(partner, where if is_alike else [])}"


def table_text() -> str:
    """The rows with their strategies, and which pairs cannot meet, for which reason."""
    rows = generate()
    lines = [f"{name_of(row)}  {strategy_of(row)}" for row in rows]
    lines += ["", "# What cannot meet, and why"]
    lines += [
        f"# {v} x {w}: {'; '.join(dict.fromkeys(reasons))}"
        for (f, v), (g, w) in all_pairs()
        if (reasons := broken_rules({f: v, g: w}))
    ]
    return "\n".join(lines) + "\n"


@functools.cache
def read_table() -> dict[str, str]:
    """Strategy by name of the row."""
    lines = TABLE.read_text().splitlines()
    return dict(line.split("  ") for line in lines if line and not line.startswith("#"))


if __name__ == "__main__":
    TABLE.write_text(table_text())
