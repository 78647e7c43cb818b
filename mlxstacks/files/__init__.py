"""Files: shards, checkpoints, adapters, stores and whole output directories."""
