"""Ranks of a pool: membership, registry, fences, messages."""
