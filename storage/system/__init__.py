"""Files, processes, start-up."""
