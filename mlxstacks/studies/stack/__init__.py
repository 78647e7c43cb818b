"""Stacks trained domain after domain, and looked at."""
