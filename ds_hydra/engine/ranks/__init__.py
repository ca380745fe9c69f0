"""Agreement of ranks beside training: errors, hosts, ranks that are lost."""
