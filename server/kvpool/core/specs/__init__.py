"""Attention kinds, groups, pool configuration and hash scheme."""
