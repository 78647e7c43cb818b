"""Predict live buffers and bytes of a run before it is launched."""
