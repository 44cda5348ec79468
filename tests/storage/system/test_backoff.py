from hypothesis import given
from hypothesis import strategies as st

from storage.system.backoff import Backoff


@given(st.integers(1, 10_000), st.none() | st.floats(0, 1e9))
def test_backoff_grows_within_bounds(failures: int, retry_after: float | None) -> None:
    """The wait is between half and all of the doubled ceiling, and at least Retry-After, up to a
    minute.
    """
    delay = Backoff(first=0.1, longest=8.0).delay(failures, retry_after)
    ceiling = min(8.0, 0.1 * 2.0 ** min(failures - 1, 30))
    asked = min(retry_after or 0.0, 60.0)
    assert max(ceiling / 2, asked) <= delay <= max(ceiling, asked * 1.1) + 1e-9


def test_backoff_is_jittered() -> None:
    """Clients that failed together do not retry together."""
    assert len({Backoff().delay(3, 60.0) for _ in range(20)}) > 1
    assert len({Backoff().delay(3) for _ in range(20)}) > 1
