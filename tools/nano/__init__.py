"""The built-in model, made again: its training, its tokenizer, its samples, its figures."""
