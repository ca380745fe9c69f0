"""Slices in and gradients out, beside the computation of an iteration."""
