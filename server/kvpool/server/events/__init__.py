"""Block events: numbered logs and ZeroMQ publishers."""
