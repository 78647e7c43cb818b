"""Adapter layers: LoRA, MoE-LoRA and stacks of it, put around the projections of a model."""
