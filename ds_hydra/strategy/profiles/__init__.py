"""Profiles of a model on one kind of hardware, fitted or measured."""
