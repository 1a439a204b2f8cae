"""What a server writes down as it changes, so that one that is killed comes back as it was. See docs/explanation/journal.md."""
