"""The journal: changes written to files, from which a killed server recovers its state. See docs/explanation/journal.md."""
