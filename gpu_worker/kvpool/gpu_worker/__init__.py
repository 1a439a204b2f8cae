"""GPU worker process, which holds the tensors of a pool's blocks. Needs torch."""
