"""Measures a profile: on all ranks, or on one device with a described cluster."""
