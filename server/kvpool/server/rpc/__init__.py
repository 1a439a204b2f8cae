"""Helpers around gRPC methods: handlers, guards that turn errors into statuses, tolerant decoding."""
