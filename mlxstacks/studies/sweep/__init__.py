"""Training at many ranks."""
