"""Specs of a model's layers, derived from its config.json or read from a file."""
