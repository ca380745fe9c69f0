"""Which sequences an iteration trains on, and how they are dispatched and packed: lengths in, plans out."""
