"""Programs that show how to use kvpool."""
