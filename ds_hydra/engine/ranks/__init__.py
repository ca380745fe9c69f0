"""What ranks tell each other beside training: errors, hosts, who is still there."""
