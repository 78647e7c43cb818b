"""Stream a checkpoint through: base and deltas in, requantized shards and their fidelity out."""
