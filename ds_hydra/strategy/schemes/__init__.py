"""What a parallel strategy is: schemes, their options, and strategies near by."""
