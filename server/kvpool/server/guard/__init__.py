"""The checks around a call; `guard.py` has their order."""
