"""What an iteration did: metrics, traces, stragglers, errors of predictions."""
