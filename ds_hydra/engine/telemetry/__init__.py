"""Records of an iteration: metrics, traces, stragglers, errors of predictions."""
