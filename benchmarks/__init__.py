"""Benchmarks of allocator work: in process, through a server, and in vLLM's KV cache manager in the same run."""
