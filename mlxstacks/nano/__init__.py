"""nano, the built-in model: a `qwen3_5_moe` of 1.8 M parameters, its data and its rebuild."""
