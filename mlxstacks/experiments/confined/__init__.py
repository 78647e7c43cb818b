"""What runs inside a sandbox, as a child of `experiments/sandbox.py`: standard library only."""
