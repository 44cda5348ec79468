"""The files of other programs, by the program's name.

A format opens files as units, and says which of their columns is the observation, the action, the
reward and so on. It judges no value: all rows go the way of any other import. What a statement of
SQL can map is one. h5py reads HDF5, and is imported when a file is opened.

`opening` imports a format's module when it is asked for: `hdf5`, `lerobot`, `obd`,
`rllib_batches`, `rllib_episodes`, `shards` (our own) and `vw`.
"""

__all__ = ["opening"]
