"""The shard format: schema, file names, writing, and the child process that writes.

Imports experience and Arrow, but no readers. `writer_main` is separate because only the child
process loads it.
"""

__all__ = [
    "arrow_arrays",
    "content",
    "decoded_size",
    "digests",
    "footers",
    "names",
    "output_writer",
    "part_block",
    "replacements",
    "schema",
    "shard",
    "stored_tables",
    "tables",
    "unrecorded_shards",
    "writer_main",
    "writer_process",
]
