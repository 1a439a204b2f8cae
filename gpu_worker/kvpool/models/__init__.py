"""What the layers of a model keep: derived from its config.json, or read from a file that states it."""
