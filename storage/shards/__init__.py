"""The shard format: schema, file names, writing, and the child process that writes.

Knows experience and Arrow; nothing of who reads. `writer_main` is apart because the child process
loads it, and what starts the child does not.
"""

__all__ = [
    "arrow_arrays",
    "content",
    "names",
    "output_writer",
    "page_sizes",
    "part_block",
    "schema",
    "shard",
    "tables",
    "unrecorded_shards",
    "writer_main",
    "writer_process",
]
