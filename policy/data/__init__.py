"""Which rows a job reads: frozen data sets, selections of the log, the schema that fits.

Each job is done once per frozen data set (`run_once`) and can be repeated safely. Imports shards,
declarations and the weights' documents; nothing that learns, judges or speaks HTTP.
"""

__all__ = ["freeze", "log_options", "log_selection", "overview", "run_once", "schemas"]
