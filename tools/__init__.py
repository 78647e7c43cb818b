"""What a clone can do that a user of the package need not."""
