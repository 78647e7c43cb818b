"""Settings of `stack` against each other."""
