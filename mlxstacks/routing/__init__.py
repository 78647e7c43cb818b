"""Which stacks answer a prompt: outcomes, router, residency, conversation."""
