"""Records of an iteration that ran, or would run: its metrics, its events, its timeline."""
