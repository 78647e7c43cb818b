"""Experiments: many runs, planned beforehand, each one kept, with a verdict in words."""
