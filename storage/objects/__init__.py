"""Bytes at rest by name: everything but the journal goes through `Objects`.

Imports file functions and errors. A local folder and an in-memory twin implement the protocol, and
`opening` says which one keeps a root; another store is a module here and a line there. A class of
checks (`conformance`) is for these and for implementations of one's own. The journal does not use
it: it is SQLite on a local disk. Nor does watching a folder. `ranged` is for libraries that read
parts of a file.
"""

__all__ = ["conformance", "folder", "interface", "memory", "opening", "ranged"]
