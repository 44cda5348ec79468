"""Classes that behave as those of other programs do, for programs that change only an import.

`rllib` has RLlib's client of the external-application API.
"""

__all__: list[str] = []
