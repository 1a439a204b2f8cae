"""Numbered logs of block events."""
