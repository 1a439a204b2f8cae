"""What allocator work costs: in process, through a server, and beside vLLM's own manager in the same run."""
