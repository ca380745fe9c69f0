"""How the sequences of one pipeline are packed."""
