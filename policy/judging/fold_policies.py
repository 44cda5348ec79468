"""A policy that judges each row by weights that have not seen it: cross-fitting.

    judged = FoldPolicies.of(spec, arrays, filter_state, lineage, folds)
    which = judged.seen.chosen(steps, lengths)     # -1: all of its policies have seen the row
    judged.logp(flat, actions, which)

A row is judged by the last of the policies, the fold policies and then the published one, that has
not seen its episode. So rows newer than the training are judged by the published policy, and the
others by a fold policy (policy.training.cross_fit). If a fold policy has only seen rows before
those that it judges, each number of a bound has the expectation of the policy that judges it, given
the rows before: the bound holds for the mean over these policies (progressive validation: Blum,
Kalai & Langford 1999, theorem 3). The published policy was trained on more than any of them. In
another order the interval is approximate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import PolicySpec
from storage.experience.range_set import RangeSet
from storage.experience.sample_batch import ORDINAL, STREAM, SampleBatch
from storage.reading.ledger import Ledger
from storage.weights.folds import Folds

Array: TypeAlias = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int8]
Lineage = Mapping[str, RangeSet]

ALL_SEEN = -1


class RowsSeen:
    """The rows that the policies of one training have seen, the published one's last."""

    def __init__(self, seen: Sequence[Lineage]) -> None:
        self._seen = [Ledger(one) for one in seen]
        self._streams = {stream for one in seen for stream in one}

    def chosen(self, steps: SampleBatch, lengths: IntArray) -> Numbers:
        """(S,) the number of the policy that judges each row's episode, or ALL_SEEN."""
        found = np.full(len(lengths), ALL_SEEN, np.int8)
        if not lengths.size:
            return found
        streams, ordinals = steps[STREAM].astype(str), steps[ORDINAL]
        begins = np.cumsum(lengths) - lengths
        for number, seen in enumerate(self._seen):
            rows = np.zeros(steps.count, np.bool_)
            for stream in self._streams:
                mine = streams == stream
                rows[mine] = seen.contains(stream, ordinals[mine])
            found[~np.logical_or.reduceat(rows, begins)] = number
        return np.repeat(found, lengths)


class FoldPolicies:
    """The policies of one training, the published one last. Safe to use from several threads."""

    def __init__(self, policies: Sequence[NumpyPolicy], seen: RowsSeen, *, in_order: bool) -> None:
        self.policies, self.seen, self.in_order = tuple(policies), seen, in_order

    @classmethod
    def of(
        cls,
        spec: PolicySpec,
        weights: Mapping[str, Array],
        filter_state: Mapping[str, Any] | None,
        lineage: Lineage,
        folds: Folds | None,
    ) -> Self:
        """The policies of stored weights."""
        published = NumpyPolicy(spec, weights, filter_state=filter_state)
        if folds is None:
            return cls([published], RowsSeen([lineage]), in_order=True)
        others = [
            NumpyPolicy(spec, one.weights, filter_state=one.filter_state) for one in folds.folds
        ]
        seen = [*(one.seen for one in folds.folds), folds.seen]
        return cls([*others, published], RowsSeen(seen), in_order=folds.in_order)

    @property
    def spec(self) -> PolicySpec:
        return self.policies[-1].spec

    @property
    def several(self) -> bool:
        """Whether there are fold policies."""
        return len(self.policies) > 1

    def logp(
        self,
        flat: npt.NDArray[np.float32],
        actions: Mapping[str, Array] | Array,
        which: Numbers,
    ) -> FloatArray:
        """(S,) log propensities, as `NumpyPolicy.logp`, each by the policy of its number."""
        found = np.empty(len(which))
        for number in np.unique(which).tolist():
            rows = which == number
            own = (
                {path: column[rows] for path, column in actions.items()}
                if isinstance(actions, Mapping)
                else actions[rows]
            )
            found[rows] = self.policies[number].logp(flat[rows], own)
        return found

    def probabilities(self, flat: npt.NDArray[np.float32], which: Numbers) -> FloatArray:
        """(S, A) probabilities of a Discrete space's actions, each by the policy of its number."""
        parts = {
            number: self.policies[number].probabilities(flat[which == number])
            for number in np.unique(which).tolist()
        }
        width = next((one.shape[1] for one in parts.values()), 0)
        found = np.empty((len(which), width))
        for number, one in parts.items():
            found[which == number] = one
        return found
