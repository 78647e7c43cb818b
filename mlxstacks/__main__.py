"""`python -m mlxstacks` is the command `mlxstacks`."""

from mlxstacks.cli import main

if __name__ == "__main__":
    main()
