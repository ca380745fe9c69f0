"""Commands of the lab, one in a file."""
