"""The engine of all studies: results, provenance, answer logs, and the renderers of results."""
