"""What can be seen from outside: block events."""
