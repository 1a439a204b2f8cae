"""Execution of a step: check the whole step, then apply it."""
