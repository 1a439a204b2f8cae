"""The journal: changes written to files, from which a killed server recovers. See docs/explanation/journal.md."""
