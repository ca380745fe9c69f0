"""Checkpoints: files that survive a crash, and shards of other numbers of ranks."""
