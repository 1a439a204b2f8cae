"""The allocator core: no I/O but that of `memory_probe`, no clock, no protobuf, no torch, and a single writer.

It imports the standard library only.
Every method is synchronous and all or nothing: it validates, then changes. Time, ids and randomness are arguments.
Block events are return values.
"""
