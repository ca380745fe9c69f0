"""`ds-hydra doctor`: whether these ranks can train, before a run finds out."""
