"""The wire: decode, check, one call into the core, encode. The only code that sees protobuf and grpc."""
