"""The gRPC server of kvpool."""
