"""Commands of the lab, one in a file: its part of the command line."""

from __future__ import annotations

from ds_hydra.lab.commands.fit import fit
from ds_hydra.lab.commands.search import search
from ds_hydra.lab.commands.simulate import simulate

COMMANDS = (fit, simulate, search)
