"""What a proposal is told of schemes beside <TP,PP>: T, MaxLen, pull and push, as text for digests.

Command: python tests/proposed_costs.py --write    (the digests of today's code)
         python tests/proposed_costs.py PROFILE HARDWARE DEVICES SPACE    (the values behind one)
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace

from shared_data import shared_path

from ds_hydra.configs import list_files
from ds_hydra.strategy.cost_models.cluster import Cluster, find_cluster
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.cost_models.estimate import estimate_from_config
from ds_hydra.strategy.profiles.profile import Profile, load_profile
from ds_hydra.strategy.proposal.space import candidate_schemes, unpruned_schemes
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

DIGESTS = shared_path("costs") / "digests.json"
DEVICES, MOST_DEVICES = (8, 16, 64), (64,)
"""On the hardware of the profile or of `COMMON`, and on other hardware."""
COMMON = ("none", "a800", "h100")
SPACES = ("full", "unpruned")
"""What a proposal compares, and all of it, dominated or not, of which phases are put together."""
CONTEXT, TOKENS = 32_768, 131_072
NONE = "none"
MEASURED = ("<sp2,1>", "<1,1;gather>", "<sp4,1;gather>")
"""Of one more profile, which measured what others estimate, on hardware without a description."""


def profile_names() -> list[str]:
    """Shipped ones, rooflines of shipped models, and one that measured other schemes, too."""
    return [*list_files("profiles"), *(f"{m} on h100" for m in list_files("models")), "measured"]


def find_profile(name: str) -> Profile:
    if " on " in name:
        return estimate_from_config(*name.split(" on "), max(DEVICES), CONTEXT)[0]
    if name != "measured":
        return load_profile(name)
    document = dict(load_profile("a800_llama2_13b").document)
    entries = [
        {**Scheme.parse(text).to_json(), "quadratic_ms": 1e-5 * n, "linear_ms": 0.1 * n,
         "constant_ms": 10.0 + n, "traffic_ms": 5.0}
        for n, text in enumerate(MEASURED, 1)
    ]  # fmt: skip
    document["schemes"] = [*document["schemes"], *entries]
    document["hardware"] = {**document["hardware"], "name": "unheard of"}
    return Profile.from_json(document)


def hardware_names(profile: str) -> tuple[str, ...]:
    """`NONE`: nothing is known of interconnects."""
    if profile in list_files("profiles"):
        return (NONE, *list_files("hardware"))
    return (NONE,) if profile == "measured" else (NONE, "h100", "b200")


def find_hardware(profile: Profile, name: str, num_devices: int) -> Cluster | None:
    return None if name == NONE else find_cluster(profile, num_devices, name)


def priced(profile: Profile, cluster: Cluster | None, num_devices: int, space: str) -> Profile:
    """What a proposal knows of all schemes that it considers."""
    world = World.of(profile, cluster, num_devices, CONTEXT)
    if space == "full":
        return world.costs.measured.table(candidate_schemes(world, "full", TOKENS))
    return world.costs.measured.table(unpruned_schemes(world, 0.0))


def lines(profile: Profile, cluster: Cluster | None, num_devices: int, space: str) -> Iterator[str]:
    """One for each scheme, in the order in which it is considered, floats to the last bit."""
    known = priced(profile, cluster, num_devices, space)
    for scheme, t in known.latency.items():
        terms = (t.quadratic_ms, t.linear_ms, t.constant_ms, t.traffic_ms, t.hidden_ms)
        held = known.max_len_tokens(scheme, num_devices) if known.memory.knows(scheme) else None
        link = ""
        if cluster is not None and scheme.num_devices <= num_devices:
            times = cluster.link_times(Strategy.alike(scheme, num_devices))
            link = f"{times.pull_ms.hex()} {times.push_ms.hex()}"
        yield f"{scheme} {' '.join(map(float.hex, map(float, terms)))} {held} {link}"


def digests(name: str) -> dict[str, str]:
    """Of one profile, by hardware, devices and space."""
    profile, found = find_profile(name), {}
    for hardware in hardware_names(name):
        for num_devices in DEVICES if hardware in COMMON else MOST_DEVICES:
            cluster = find_hardware(profile, hardware, num_devices)
            for bits in (2, 4) if hardware in COMMON[1:] else (2,):
                if cluster is not None:
                    cluster = replace(cluster, gradient_bytes=bits)
                for space in SPACES:
                    text = "\n".join(lines(profile, cluster, num_devices, space))
                    key = f"{hardware} {num_devices} {space}" + " fp32" * (bits == 4)
                    found[key] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def main(arguments: list[str]) -> None:
    if arguments == ["--write"]:
        found = {name: digests(name) for name in profile_names()}
        DIGESTS.write_text(json.dumps(found, indent=1) + "\n")
        return
    name, hardware, devices, space = arguments
    profile = find_profile(name)
    cluster = find_hardware(profile, hardware, int(devices))
    print(*lines(profile, cluster, int(devices), space), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
