"""What runs inside a sandbox, as a child of `studies/sandbox.py`: standard library only."""
