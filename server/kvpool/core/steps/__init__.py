"""A scheduling step and its result, as columns."""
