"""How far the next tokens of models are from those of a reference."""
