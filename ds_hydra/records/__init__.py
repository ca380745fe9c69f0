"""What an iteration did, or would do: its metrics, its events, its timeline."""
