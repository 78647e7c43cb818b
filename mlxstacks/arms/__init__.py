"""Arms of a study: a model, fused or with an adapter, that answers; and what it is trained on."""
