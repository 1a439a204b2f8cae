"""The allocator without I/O: no grpc, protobuf, asyncio, torch, clock or environment, and only one writer.

Every method is synchronous and all or nothing: it checks, then changes. Time, ids and randomness come in as
arguments; block events go out as return values.
"""
