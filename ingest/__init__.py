"""Clients, the wire protocol, and the collector with its HTTP server.

Imports storage, and a few modules of policy where weights are used to act. Users import from
`headrace`; the other packages import by full module name.
"""
