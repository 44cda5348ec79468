"""The files of other programs, by the program's name.

A format opens files as units, and says which of their columns is the observation, the action, the
reward and so on. It does not check values: its rows are imported like any others. Where SQL can map
the columns, a format is a statement. h5py reads HDF5, and is imported when a file is opened.

`opening` imports a format's module when it is asked for: `hdf5`, `lerobot`, `obd`,
`rllib_batches`, `rllib_episodes`, `shards` (our own) and `vw`.
"""

__all__ = ["opening"]
