"""An HTTP server that answers each request by its own route: base, adapter, stacks or routed."""
