"""Arms of a study: a model, fused or with an adapter, that answers; its training items; suites."""
