"""Models of other formats as mlx-lm directories, and dense models as mixtures of experts."""
