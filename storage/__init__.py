"""Experience, in memory and at rest.

Knows neither policy nor ingest. Users import from `headrace`; other packages by full module name.
"""
