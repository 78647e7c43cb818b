"""Which experts groups of prompts go to."""
