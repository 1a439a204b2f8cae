"""`python -m kvpool.cli` is the same program as `kvpool`."""

from kvpool.cli import main

main(prog_name="kvpool")
