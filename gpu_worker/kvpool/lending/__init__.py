"""Lending: a rank's memory, mapped by the processes of engines on its machine."""
