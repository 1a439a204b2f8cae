"""What goes wrong with a process that was started. Cheap to import."""


class ChildError(RuntimeError):
    """A child process could not do its work; says why."""
