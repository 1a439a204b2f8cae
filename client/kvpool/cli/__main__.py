"""`python -m kvpool.cli` is the same program as `kvpool`."""

from kvpool.cli import main

if __name__ == "__main__":  # tools that read the docstrings import it
    main(prog_name="kvpool")
