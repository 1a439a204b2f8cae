"""Authentication and authorization: certificates, tokens, permissions per RPC."""
