"""Parallel strategies: schemes, their options, and strategies near by."""
