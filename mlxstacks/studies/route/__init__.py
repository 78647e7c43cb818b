"""Routing found out, trained, asked and evaluated."""
