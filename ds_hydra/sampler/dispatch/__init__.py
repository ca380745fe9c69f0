"""Which pipeline gets which sequence."""
