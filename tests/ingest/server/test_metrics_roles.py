"""Each role's rewards are in `/metrics`, in as many series after 500 versions as after two."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from ingest.client.policy_client import PolicyClient
from ingest.collector.collector import Collector
from ingest.collector.stores import stores_in_memory
from ingest.server.action_routes import Acting
from ingest.server.metrics import Metrics, Sources
from ingest.web.asgi import Router
from ingest.web.limits import ServerLimits
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.declarations.declaration import PolicyDeclaration
from tests.collector_process import CollectorProcess, declare
from tests.ingest.client.test_local_inference import SPEC, publish
from tests.ingest.client.test_local_inference_canary import candidate, play, wait_served
from tests.ingest.collector.test_version_metrics import part
from tests.ingest.server.test_metrics import scraped

VERSIONS = 500


def test_many_versions_make_no_more_series() -> None:
    """Each version is published and used; the series are by role."""

    async def run() -> tuple[Counter[str], Counter[str]]:
        policy = PolicyDeclaration(observation=SPEC.observation, action=SPEC.action)
        kept = stores_in_memory({"default": policy})
        collector = Collector(kept.journal, kept.writer, kept.policies)
        live, router = kept.live, Router(ServerLimits())
        metrics = Metrics(Sources(collector, live, router, Acting(collector, live)))
        store = live.store("default")
        assert store.in_memory
        store._check = lambda candidate, weights: None  # the same weights each time

        def series() -> Counter[str]:
            families = text_string_to_metric_families(metrics.text().decode())
            return Counter(sample.name for family in families for sample in family.samples)

        first = None
        weights = Policy(SPEC, seed=1).get_weights()
        for number in range(1, VERSIONS + 1):
            digest = store.add_candidate(
                weights, spec=SPEC.to_json(), metrics={"number": number}, lineage={}
            )
            store.publish(digest)
            if number in (2, VERSIONS):
                live.refresh()
            collector.played.note("s", [part([1.0], [number], ordinal=number)])
            if number == 2:
                first = series()
        assert live.roles("default") == {"live": VERSIONS, "previous": VERSIONS - 1, "canary": None}
        assert first is not None
        return first, series()

    first, last = asyncio.run(run())
    assert first == last
    assert last["headrace_episode_return_n"] == 4, "a series more for what came before"
    assert sum(count for name, count in last.items() if "return" in name) == 12


def test_each_role_has_its_own_sums(tmp_path: Path) -> None:
    """Sums of the live version, the one before it and the canary, as clients used them."""
    declare(tmp_path)
    for seed in (1, 2):
        publish(tmp_path, seed)
    store = WeightStore(tmp_path, "default")
    with CollectorProcess(tmp_path) as process:
        with PolicyClient(process.address, update_interval=0.0) as client:
            store.start_canary(candidate(store, 3), 0.5)
            wait_served(process, store)
            for _ in range(20):
                play(client)
        process.settle(40)
        found = scraped(process)
        for role, version in {"live": 2, "previous": 1, "canary": 3}.items():
            assert found[f"headrace_role_version policy=default role={role}"] == version
        played = {
            role: found[f"headrace_episode_return_n policy=default role={role}"]
            for role in ("live", "previous", "canary")
        }
        assert played["previous"] == 0
        assert played["live"] + played["canary"] == 20
        assert 0 < played["canary"] < 20
        for role, n in played.items():
            labels = f"policy=default role={role}"
            assert found[f"headrace_episode_return_sum {labels}"] == 2 * n
            assert found[f"headrace_episode_return_sum_of_squares {labels}"] == 4 * n
            assert found[f"headrace_step_reward_n {labels}"] == 2 * n
            assert found[f"headrace_action_propensity_n {labels}"] == 2 * n
        assert process.stop() == 0
