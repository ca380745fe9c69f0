"""Datasets: lengths, examples, global batches."""
