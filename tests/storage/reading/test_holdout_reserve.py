"""Holding out episodes for judging: whole clusters, always the same ones."""

from __future__ import annotations

import numpy as np
import pytest

from storage.experience.sample_batch import SampleBatch
from storage.reading.holdout import Reserve, held_out


def users(n: int = 2_000) -> SampleBatch:
    """Ten rows of ten episodes a user; every third user has no tag."""
    rows = [(f"e{i}", f'{{"plan":"a","user":"u{i // 10}"}}') for i in range(n)]
    tags = [text if i // 10 % 3 else "{}" for i, (_, text) in enumerate(rows)]
    return SampleBatch(eps_id=np.array([e for e, _ in rows], object), tags=np.array(tags, object))


def test_an_episode_is_the_unit_by_default() -> None:
    """Frozen, so that an existing log is always split in the same way."""
    batch = users()
    assert (Reserve(0.3).rows(batch) == held_out(batch, 0.3)).all()
    assert Reserve(0.3).columns == ("eps_id",)
    assert not Reserve(0.0).rows(batch).any()
    assert Reserve(1.0).rows(batch).all()


def test_a_cluster_is_reserved_whole() -> None:
    """All episodes of a user on one side; those without the tag by themselves."""
    batch, reserve = users(), Reserve(0.3, "tag:user")
    rows = reserve.rows(batch).reshape(-1, 10)
    tagged = np.arange(200) % 3 != 0
    assert set(rows[tagged].sum(axis=1)) == {0, 10}
    assert 0.2 < rows[tagged].mean() < 0.4
    assert len(set(rows[~tagged].sum(axis=1))) > 2
    assert reserve.columns == ("eps_id", "tags")
    assert (Reserve(0.5, "tag:user").rows(batch) | ~reserve.rows(batch)).all()


def test_a_tag_may_have_the_episode_s_id_as_its_value() -> None:
    """Whether an episode has the tag is not seen by the unit's name."""
    batch = users()
    named = [f'{{"session":"{name}"}}' for name in batch["eps_id"]]
    own = SampleBatch(eps_id=batch["eps_id"], tags=np.array(named, object))
    assert Reserve(0.3, "tag:session").tagged(own).all()
    assert Reserve(0.3).tagged(batch).all()
    assert (Reserve(0.3, "tag:user").tagged(batch) == (np.arange(2_000) // 10 % 3 != 0)).all()


@pytest.mark.parametrize(
    ("share", "cluster", "text"),
    [(1.5, "", "evaluation_share"), (0.3, "user", "tag:NAME"), (0.3, "tag:", "tag:NAME")],
)
def test_what_names_no_split_is_refused(share: float, cluster: str, text: str) -> None:
    """A bad share or cluster is refused with its name."""
    with pytest.raises(ValueError, match=text):
        Reserve(share, cluster)


def test_an_unknown_tag_is_refused_with_the_known_ones() -> None:
    """Also in words if the episodes have none so far."""
    reserve = Reserve(0.3, "tag:user")
    reserve.require_tag({"user", "page"})
    with pytest.raises(ValueError, match=r"a tag of the episodes, \['page'\], got 'user'"):
        reserve.require_tag({"page"})
    with pytest.raises(ValueError, match="of which none has any so far, got 'user'"):
        reserve.require_tag(set())
