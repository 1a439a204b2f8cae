"""What a GPU worker process runs: it holds the tensors of a pool's blocks. The only package that imports torch."""
