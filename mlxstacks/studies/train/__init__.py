"""One LoRA trained from settings."""
