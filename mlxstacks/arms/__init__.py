"""Arms of a study: a model, fused or with an adapter, that answers; what it is trained on; suites."""
