"""Who gets into a server: certificates, tokens, and what may be spoken without encryption."""
