"""A `ds_hydra.simulation/1` document as text."""

from __future__ import annotations

from typing import Any


def describe_simulation(documents: list[dict[str, Any]], document: dict[str, Any]) -> str:
    """What users see of simulated workloads; `document` is that of a case, or holds them all."""
    lines = []
    for point in documents:
        lines += [_head(point), *_system_lines(point), ""]
    if "published" in document:
        lines.append(f"published ({document['figure']}) and simulated here:")
        lines += [
            f"  {e['what']}: paper {e['paper']}, here {e['ours']}" for e in document["published"]
        ]
    return "\n".join(lines).rstrip()


def _head(point: dict[str, Any]) -> str:
    ours = point["systems"][0]
    return (
        f"{point['name']}: {point['num_devices']} devices, context {point['context_length']:,}, "
        f"{point['tokens_per_iteration']:,} tokens per iteration, {point['iterations']} mini-batches\n"
        f"ds_hydra: {ours['strategy']}\n"
        f"propagation {point['distance_to_bound']:.1%} above the perfect-balance bound of "
        f"{point['perfect_balance_ms']:,.0f} ms; perfect balance has imbalance {point['imbalance_of_bound']:.2f}"
        + (_plain_head(point["plain"]) if "plain" in point else "")
        + ("\nT under SP and of gathered layers is estimated" if point["space"] == "full" else "")
        + (
            f"\nTFLOP/s and MFU are left out: {point['flops_unknown']}"
            if point["flops_unknown"]
            else ""
        )
    )


def _rate(system: dict[str, Any]) -> str:
    """TFLOP/s of each device and MFU, as far as they are known."""
    if system["tflops_per_device"] is None:
        return "-"
    share = "" if system["mfu"] is None else f", {system['mfu']:.0%}"
    return f"{system['tflops_per_device']:.3g}{share}"


def _plain_head(plain: dict[str, Any]) -> str:
    return (
        f"\n<TP,PP> alone: {plain['distance_to_bound']:.1%} above the bound of that space, "
        f"{plain['perfect_balance_ms']:,.0f} ms (imbalance {plain['imbalance_of_bound']:.2f})"
    )


def _system_lines(point: dict[str, Any]) -> list[str]:
    ours, *_ = point["systems"]
    has_price, has_spread = "dollars_per_billion_tokens" in ours, "speedup_69_percent_seen" in ours
    lines = [
        f"{'':34}{'iteration, ms':>18}{'tokens/s':>12}{'TFLOP/s, MFU':>14}{'speed-up (95%)':>20}"
        + (f"{'20% off':>13}{'69% seen':>10}" if has_spread else "")
        + f"{'propagation':>13}{'imbalance':>11}{'bubble':>8}{'$/10^9 tokens' if has_price else '':>15}  strategy"
    ]
    for s in point["systems"]:
        low, high = s["speedup_95"]
        price = f"{s['dollars_per_billion_tokens']:,.0f}" if has_price else ""
        strategy = "" if s["name"] == "ds_hydra" else s["strategy"]
        spread = ""
        if has_spread:
            least, most = s["speedup_20_percent_off"]
            spread = f"{f'{least:.2f}-{most:.2f}':>13}{s['speedup_69_percent_seen']:>10.2f}"
        lines.append(
            f"{s['label']:34}{s['iteration_ms']:>10,.0f} ± {s['iteration_ms_standard_error']:<5,.0f}"
            f"{s['tokens_per_s']:>12,.0f}{_rate(s):>14}{s['speedup']:>8.2f} ({low:.2f}-{high:.2f}){spread}"
            f"{s['speedup_of_propagation']:>13.2f}{s['imbalance']:>11.2f}{s['bubble']:>8.0%}{price:>15}  {strategy}"
        )
    if ours["tflops_per_device"] is not None:
        lines.append(
            "TFLOP/s of each device: what the model needs for the sequences' own lengths, causal attention half, "
            "recomputation not counted, over the whole iteration; MFU: its share of the device's peak in 16 bit, a "
            "ceiling for runs, as what slows them down by chance is left out"
        )
    if has_spread:
        lines.append(
            "20% off: smallest and largest speed-up if T, interconnects or attention are 20% slower or faster; "
            "69% seen: with that share of all transfers on top of propagation"
        )
    return lines
