"""A shard on more than one machine: a primary, its standbys, and the directory that says which server is which."""
