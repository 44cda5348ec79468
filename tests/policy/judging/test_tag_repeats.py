"""The tag of a unit is found among others, also if it has very many values."""

import pytest

from policy.judging import tag_repeats
from policy.judging.tag_repeats import TagRepeats


def added(**tags):
    found = TagRepeats()
    for begin in (0, 300):
        found.add({tag: values[begin : begin + 300] for tag, values in tags.items()})
    return found.most()


def test_the_tag_that_repeats_most_is_named():
    """Countries are too few, sessions come once."""
    number = range(600)
    users, countries = [f"u{i % 30}" for i in number], [f"c{i % 29}" for i in number]
    assert added(user=users, country=countries, session=[f"s{i}" for i in number]) == ("user", 20.0)


@pytest.mark.parametrize(("each", "found"), [(5, True), (4, False)])
def test_few_repetitions_are_no_unit(each, found):
    """Episodes without the tag do not count."""
    users = [f"u{i // each}" for i in range(300)] + [None] * 300
    assert (added(user=users) is not None) is found


def test_of_many_values_a_share_is_counted(monkeypatch):
    """Whole values are kept or left, so the mean is nearly the same."""
    monkeypatch.setattr(tag_repeats, "MOST_VALUES", 40)
    tag, repeats = added(user=[f"u{i % 120}" for i in range(600)])
    assert (tag, repeats) == ("user", 5.0)
