"""Checks of a configuration without ranks."""
