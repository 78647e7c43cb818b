"""lm-evaluation-harness (extra `eval`): its tasks, asked of our arms."""
