"""gRPC services: decode, call the core, encode."""
