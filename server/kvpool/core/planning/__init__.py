"""Memory planning: from layer specs and free bytes to groups, tensors and num_blocks."""
