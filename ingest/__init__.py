"""The edge: everything that a client touches.

Knows storage; policy only in `client.local_inference` and `collector.live_policies`. Users import
from `headrace`; other packages by full module name.
"""
