"""Commands, recipes and settings: one table, one way from YAML and options to a settings object."""
