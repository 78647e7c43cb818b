"""`mlxstacks push` and `pull`: adapters, stores and models to and from the Hugging Face hub."""
