"""Partitioned subspace networks: stacks on a base that knows nothing, and blocks beside a base."""
