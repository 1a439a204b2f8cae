"""Transports of a session: gRPC, and the core in the caller's process."""
