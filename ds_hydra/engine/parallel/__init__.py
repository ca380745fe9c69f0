"""Collectives inside one pipeline: groups, tensor and sequence parallelism, 1F1B."""
