"""What a GPU worker process runs. Not built yet."""
