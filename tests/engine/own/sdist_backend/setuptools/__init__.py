"""Stands in the place of setuptools: see build_meta.py."""
