"""Sub-commands of `ds-hydra`, one in a file."""
