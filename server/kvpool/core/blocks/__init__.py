"""Blocks of one pool: free list, prefix map, group managers, KV cache manager."""
