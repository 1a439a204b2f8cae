"""Conversions between protobuf messages and core values; errors and statuses, addresses, channels."""
