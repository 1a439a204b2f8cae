"""The status page of a server, and the same figures as JSON."""
