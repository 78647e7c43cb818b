"""Stack LoRA adapters on quantized mixture-of-experts models, natively on MLX."""

__version__ = "0.1.0"
