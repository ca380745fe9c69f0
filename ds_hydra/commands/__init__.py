"""Sub-commands of `ds-hydra`, one file each with a function `register(app)`."""
