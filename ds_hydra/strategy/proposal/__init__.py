"""Strategies that suit a dataset."""
