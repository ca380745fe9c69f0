"""Which strategies suit a dataset."""
