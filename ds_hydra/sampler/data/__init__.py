"""Datasets: lengths, examples, mini-batches."""
