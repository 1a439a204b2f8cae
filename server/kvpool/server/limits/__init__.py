"""Limits on the memory and time that clients can make the server use."""
