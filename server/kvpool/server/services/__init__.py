"""gRPC services: decode the request, call the core, encode the result."""
