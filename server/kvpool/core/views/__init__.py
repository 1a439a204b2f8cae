"""Read-only views of pools, sessions, requests and blocks."""
