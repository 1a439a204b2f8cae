"""GPU worker process, which holds the tensors of a pool's blocks. The only package that imports torch."""
