"""Tables of simulated cases, for the pages of the documentation."""

from __future__ import annotations

from typing import Any

import numpy as np

OURS, PAPER = "ds_hydra", "paper"
NOISE = 0.002
"""By less than that nothing is slower: the planner does not look for it."""
COLUMNS = (
    PAPER, "deepspeed_balanced", "deepspeed_degrees", "flexsp", "flexsp_hidden", "fcp", "dynamic_cp",
    "hotspa", "two_stage",
)  # fmt: skip
"""Systems of the table of cases."""


def results(cases: list[dict[str, Any]]) -> str:
    """What stands under "Results": means, cases, and where ds_hydra is not ahead."""
    lines = [
        f"{len(cases)} cases, {cases[0]['iterations']} global batches each. Simulated "
        "from published or estimated coefficients; nothing was measured on a GPU. Speed-ups of ds_hydra with "
        "all its schemes and the engine's memory, in whole iterations unless said otherwise. A dash: the system cannot "
        "run the case, or is younger than the figures of the case.",
        "",
    ]
    for group in dict.fromkeys(map(_group, cases)):
        mine = [case for case in cases if _group(case) == group]
        lines += [f"### {group}", "", *_means(mine), "", *_cases(mine), ""]
    lines += _by_size(cases)
    return "\n".join([*lines, "### Where ds_hydra is not ahead", "", *_not_ahead(cases), ""])


_RIVALS = ("zero3", "deepspeed_balanced", "deepspeed_degrees", "flexsp", "flexsp_hidden", "fcp")
"""Systems of the table by model and devices."""


def _by_size(cases: list[dict[str, Any]]) -> list[str]:
    """Return the table of speed-ups by model and devices over both histograms of Fig. 10."""
    found: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        if case["figure"] == "Fig. 10":
            _, model, devices, _ = case["name"].split("-")
            row = f"{model.upper()}, {devices.removesuffix('gpu')} devices"
            found.setdefault(row, []).append(_systems(case))
    if not found:
        return []
    labels = [next(iter(found.values()))[0][name]["label"] for name in _RIVALS]
    lines = [
        "### Fig. 10 by model and devices",
        "",
        "Geometric means of the speed-up over both datasets and three token budgets.",
        "",
        f"| LLaMA | {' | '.join(labels)} |",
        "|---" * (len(labels) + 1) + "|",
    ]
    for row, systems in found.items():
        speedups = ([s[name]["speedup"] for s in systems if name in s] for name in _RIVALS)
        means = (f"{geometric_mean(found):.2f}" if found else "-" for found in speedups)
        lines.append(f"| {row} | {' | '.join(means)} |")
    return [*lines, ""]


def _group(case: dict[str, Any]) -> str:
    """Cases of Fig. 10 by their lengths, all others by their figure."""
    if case["figure"] == "Fig. 10":
        return f"Fig. 10, {case['histogram']}"
    return str(case["figure"])


def _systems(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {system["name"]: system for system in case["systems"]}


def geometric_mean(values: list[float]) -> float:
    """Of speed-ups."""
    return float(np.exp(np.mean(np.log(values))))


def _means(cases: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| speed-up over | cases | geometric mean | smallest | largest | propagation |",
        "|---" * 6 + "|",
    ]
    labels = {s["name"]: s["label"] for case in cases for s in case["systems"]}
    for name, label in labels.items():
        found = [s[name] for case in cases if name in (s := _systems(case))]
        if name == OURS:
            continue
        whole = [s["speedup"] for s in found]
        propagation = [s["speedup_of_propagation"] for s in found]
        cells = [
            label,
            str(len(found)),
            f"{geometric_mean(whole):.3f}",
            f"{min(whole):.3f}",
            f"{max(whole):.2f}",
            f"{geometric_mean(propagation):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    ours = [_systems(case)[OURS] for case in cases]
    imbalance = np.mean([system["imbalance"] for system in ours])
    above = np.mean([case["distance_to_bound"] for case in cases])
    lines += [
        "",
        f"Imbalance of ds_hydra {imbalance:.3f} on average; propagation {above:.1%} "
        "above the bound of perfect balance.",
    ]
    return lines


def _cases(cases: list[dict[str, Any]]) -> list[str]:
    labels = {s["name"]: s["label"] for case in cases for s in case["systems"]}
    columns = [name for name in COLUMNS if name in labels]
    heads = " | ".join(labels[name] for name in columns)
    lines = [
        f"| case | iteration, ms | {heads} | best of others | above the bound |",
        "|---" * (len(columns) + 4) + "|",
    ]
    for case in cases:
        found = _systems(case)
        closest = min(float(s["speedup"]) for name, s in found.items() if name != OURS)
        ours = found[OURS]
        cells = [
            case["name"],
            f"{ours['iteration_ms']:,.0f} ± {ours['iteration_ms_standard_error']:,.0f}",
            *(f"{found[n]['speedup']:.2f}" if n in found else "-" for n in columns),
            f"{closest:.2f}",
            f"{case['distance_to_bound']:.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _not_ahead(cases: list[dict[str, Any]]) -> list[str]:
    lines = []
    for case in cases:
        slower = [
            f"{s['label']} {s['speedup']:.3f} (propagation {s['speedup_of_propagation']:.2f})"
            for s in case["systems"]
            if s["name"] != OURS and s["speedup"] < 1 - NOISE
        ]
        if slower:
            lines.append(f"- {case['name']}: {'; '.join(slower)}")
    return lines or ["In no case."]


HEADROOM = "What a better planner could gain"
_AT_BOUND = ("deepspeed_degrees", "flexsp", "flexsp_hidden", "fcp")
"""Systems of the table of bounds."""


def headroom(cases: list[dict[str, Any]]) -> str:
    """Speed-ups if every plan took its lower bound, and how far plans are above it."""
    lines = [
        "Speed-ups of ds_hydra as planned, and if propagation of every global batch took no longer than a proven lower "
        "bound of it, with what is seen of pull, push and step as it is; smallest in brackets. By the bound sequences "
        "are divided freely and every device is busy to the end. But each runs on schemes alone where it ends in time "
        "by itself, groups have their constants, stages their bubble, and steps hold what memory says "
        "(`lab/simulator/scenario.py`). *Candidates*: schemes of the strategies proposed; *all schemes*: the full "
        "space. What is above the last column no planner reaches, whatever it searches.",
        "",
        "| speed-up over | cases | as planned | at the bound of the candidates | at that of all schemes |",
        "|---|---|--:|--:|--:|",
    ]
    groups = list(dict.fromkeys(map(_group, cases)))
    for name in _AT_BOUND:
        for group in groups:
            mine = [c for c in cases if _group(c) == group and name in _systems(c)]
            if not mine:
                continue
            found = np.array([_at_bounds(case, name) for case in mine])
            cells = [f"{geometric_mean(own):.3f} ({own.min():.3f})" for own in found.T]
            lines.append(f"| {_systems(mine[0])[name]['label']} | {group} | {' | '.join(cells)} |")
    above = np.array([_above_bounds(case) for case in cases])
    worst = [cases[k]["name"] for k in above[:, 1].argsort()[::-1][:3]]
    (mean, of_all), (most, most_of_all) = above.mean(axis=0), above.max(axis=0)
    lines += [
        "",
        f"Propagation of ds_hydra is {mean:.1%} above the bound of its candidates in the mean of {len(cases)} cases "
        f"({most:.1%} at most), and {of_all:.1%} above that of all schemes ({most_of_all:.1%}); furthest from it "
        f"{', '.join(worst)}.",
    ]
    return "\n".join(lines)


def _at_bounds(case: dict[str, Any], name: str) -> list[float]:
    """The speed-up over a system as planned, at the bound of the candidates, at that of all."""
    systems = _systems(case)
    ours = systems[OURS]
    outside = ours["iteration_ms"] - ours["propagation_ms"]
    bounds = (case["bound_of_candidates_ms"], case["perfect_balance_ms"])
    times = (ours["iteration_ms"], *(outside + bound for bound in bounds))
    return [systems[name]["iteration_ms"] / time for time in times]


def _above_bounds(case: dict[str, Any]) -> list[float]:
    """Propagation above the bound of the candidates, and above that of all schemes."""
    taken = _systems(case)[OURS]["propagation_ms"]
    return [taken / case[key] - 1 for key in ("bound_of_candidates_ms", "perfect_balance_ms")]


REASONS = {
    "InfiniPipe": "The paper ran its baselines with activation checkpointing and solvers of seconds, on data of its "
    "own; here each is tuned with hindsight and hides what it can. Global batches of 512 sequences are as many tokens "
    "on average; LLaMA 30B has the shape of the published 32B profile.",
    "FlexSP": "A100-40GB from a roofline, not measured; the paper's DeepSpeed and Megatron-LM pack to the context, its "
    "solver has a deadline, and its data are other samples.",
    "Skrull": "Fine-tuning lengths from four published quantiles, spread evenly between them; there is no row of "
    "Skrull itself, whose schedule over <DP,CP> dynamic CP bounds from below.",
    "ByteScale": "Only ratios compare: 1,024 devices of another kind; here 64 with a 16th of context and tokens. "
    "Static is Megatron-LM without CP, balanced is dynamic CP; its naive variant is not simulated.",
    "Fig. 10": "The paper gives bars without numbers, so only the range of its text can be compared. Its baselines "
    "ran on hardware; ours prefetch and overlap perfectly, pay bytes only for switching, and are tuned with "
    "hindsight, so they are faster than the paper's: most of all DeepSpeed, which Megatron-LM beats there.",
    "Fig. 11": "Curves without numbers; ds_hydra is the fastest of the paper's systems at every point here, too. "
    "Contexts, tokens and devices are those named in the text, or doublings.",
    "Fig. 12": "The paper shows 5 iterations of propagation on hardware; ours are predicted times, so ours lacks all "
    "noise, and Megatron-LM's rows are dealt out in the order of first-fit decreasing, which leaves its last "
    "replica a row of remainders.",
    "Table 1": "Link times here are bytes over the two levels of interconnects, with 32-bit gradients, without casts, "
    "launches and message latency, which the paper's 1.11 s and 1.71 s contain. Overlapped, a tenth of them is seen "
    "here where the paper sees 1.18 s: overlap is perfect, rows are ordered to hide the link, and it "
    "counts in the choice of strategies. Propagation differs because the "
    "published T coefficients, our length histogram and our planner are not those of the run in the paper.",
}


NOT_SIMULATED = (
    "FlexSP, 13B and 30B at 384K, 30B at 192K: ds_hydra fits 217,080 tokens of 13B on 64 A100-40GB, and 30B has no "
    "published shape here; the rest of that paper's cases stand above.",
    "Fig. 1: time of an attention kernel on one device; ours has T of whole layers alone.",
    "Fig. 3, 14: longest sequence of global batches of the paper's data, of which only the distribution is known; that "
    "of any histogram: `ds-hydra lengths`.",
    "Fig. 4: memory and throughput of single schemes, which the published T and App. B.1 were fitted to: nothing would "
    "be tested.",
    "Fig. 5: sequences in each micro-batch of one global batch that is not published.",
    "Fig. 12a: strategies of 100 iterations are those of the case study; slowest over fastest is not a published "
    "number.",
    "Fig. 13: bars without numbers, of steps between Megatron-LM and the system.",
    "Fig. 15, 16: measured latency of single passes and of pairs of sequences; a simulation has T in place of it.",
    "Fig. 17: dispatch against the integer program: `docs/benchmarks/planner.md`.",
    "Table 3: settings of Megatron-LM, DeepSpeed and HotSPa, which are tuned here, so no slower than theirs.",
    "Table 1: the published T is 18% below the authors' own run (5.59 s here, 6.78 s there), so all times here are.",
)
"""What of the paper has no simulated figure, and why."""


def document(cases: list[dict[str, Any]], iterations: int) -> str:
    """docs/reproduction.md."""
    lines = [
        "# The paper's cases, simulated",
        "",
        f"Made by `make reproduce`: {iterations} global batches for each case, the same for every system.",
        "",
        "- *Published, measured by others*: T of every scheme and the memory constants (LLaMA 7B, 13B, 32B on A800).",
        "- *Simulated*: every time below. No figure here was measured on a GPU.",
        "- *Assumed*: lengths are drawn from the shipped histograms (the paper's samples are not published); link "
        "rates and efficiencies are those of `configs/hardware/a800.json`; a forward takes a third of T; stages send "
        "without waiting; pull and push overlap layer by layer; DeepSpeed's T on one rank is PP times that of "
        "<1,PP>.",
        "- *Imbalance* and *bubble* are those of propagation with every parameter in place.",
        "- Ranges in brackets hold 95% of paired resamples of the global batches. The *bound* is perfect balance: "
        "every sequence divided freely between schemes where it ends in time, all devices always busy.",
        "- *The same, memory of the paper* is the system of the paper, and what its published figures are compared "
        "with; *ds_hydra, <TP,PP> alone* has the engine's memory. *ds_hydra* may also use "
        "sequence parallelism, gathered layers and checkpointed ones, whose T nobody has published: it is estimated; "
        "see [simulated speed-ups](benchmarks/simulate.md).",
        "",
    ]
    for figure in dict.fromkeys(case["figure"] for case in cases):
        mine = [case for case in cases if case["figure"] == figure]
        lines += [f"## {figure}", ""]
        lines += [f"Why they differ: {REASONS[figure]}", ""] if figure in REASONS else []
        for case in mine:
            lines += [*_case_lines(case), ""]
    lines += [
        "## Not simulated",
        "",
        *(f"- {line}" for line in NOT_SIMULATED),
        "",
    ]
    return "\n".join(lines)


def _case_lines(case: dict[str, Any]) -> list[str]:
    lines = [
        f"### {case['name']}",
        "",
        f"{case['profile']}, {case['histogram']}, {case['num_devices']} devices, context {case['context_length']:,}, "
        f"{case['tokens_per_iteration']:,} tokens per iteration. ds_hydra chose {case['systems'][0]['strategy']}; its "
        f"propagation is {case['distance_to_bound']:.1%} above the bound."
        + "".join(
            f" {label}: {case[name]['distance_to_bound']:.1%} above the bound of that space."
            for name, label in (("plain", "<TP,PP> alone"), (PAPER, "With the paper's memory"))
            if name in case
        ),
        "",
        "| published | paper | here |",
        "|---|---|---|",
        *(f"| {e['what']} | {e['paper']} | {e['ours']} |" for e in case["published"]),
        "",
        "| system | strategy | iteration, ms | ds_hydra is faster by | in propagation | imbalance | bubble |",
        "|---" * 7 + "|",
    ]
    for system in case["systems"]:
        low, high = system["speedup_95"]
        strategy = "" if system["name"] == "ds_hydra" else system["strategy"]
        lines.append(
            f"| {system['label']} | {strategy} | {system['iteration_ms']:,.0f} ± "
            f"{system['iteration_ms_standard_error']:,.0f} | {system['speedup']:.2f} ({low:.2f}-{high:.2f}) | "
            f"{system['speedup_of_propagation']:.2f} | {system['imbalance']:.2f} | {system['bubble']:.0%} |"
        )
    return lines
