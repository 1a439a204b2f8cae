"""Conversions between protobuf messages and the core's values; addresses, channels and errors."""
