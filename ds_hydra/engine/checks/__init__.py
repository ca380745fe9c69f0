"""What a configuration would do, found without ranks."""
