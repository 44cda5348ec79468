"""Experience in memory and in files, declarations, and published weights.

Imports neither policy nor ingest. Users import from `headrace`; the other packages import by full
module name.
"""
