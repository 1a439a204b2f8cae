"""The service: `core` decides, `rpc` speaks, `obs` shows."""
