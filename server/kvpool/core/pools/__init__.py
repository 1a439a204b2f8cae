"""The pools of a server."""
