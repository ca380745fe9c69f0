"""The user's model as pipeline stages: layers on slices, attention, adapters, compilation."""
