"""Operators: arrays in, arrays out; no modules, no files, no printing."""
