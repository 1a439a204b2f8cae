"""Limits on what clients can make the server hold or do."""
