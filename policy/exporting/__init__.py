"""The steps of a log in the files of other programs, by the program's name.

`runs` reads the log, once, for all formats. A format is a function that writes the folder of a data
set; `opening` imports its module when it is asked for: `episodes` (packed ones), `hdf5`, `lerobot`,
`tables` and `torchrl`. `ray_data` gives the same rows to Ray without a file.
"""

__all__ = ["opening", "ray_data", "runs"]
