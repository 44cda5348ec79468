"""A collector inside a trainer's process, and environments that call us."""
