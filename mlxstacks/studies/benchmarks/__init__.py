"""Benchmarks: prompts, answers taken out of text, and how they are scored."""
