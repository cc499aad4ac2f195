"""vLLM's scheduler side: the factory's connector is watched where the scheduler asked for it, and nowhere else."""

import enum
import types

from kvprobe.instrument import event_log
from kvprobe.patches.vllm_offload import Offload


class Role(enum.Enum):
    SCHEDULER, WORKER = range(2)


class Request:
    request_id, num_tokens = "a", 64


class Connector:
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 48, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        return "allocated"

    def update_connector_output(self, connector_output):
        return "heard"


def test_the_schedulers_connector_is_watched_and_the_workers_is_not():
    class KVConnectorFactory:
        @classmethod
        def create_connector(cls, config, role, kv_cache_config=None):
            return Connector()

    module = types.ModuleType("vllm.distributed.kv_transfer.kv_connector.factory")
    KVConnectorFactory.__module__ = module.__name__
    KVConnectorFactory.__qualname__ = "KVConnectorFactory"
    module.KVConnectorFactory = KVConnectorFactory
    adapter = Offload()
    assert adapter.prepare(("vllm", "0.33.0"), "off")
    with event_log.subscribed() as events:
        adapter.instrument(module)
        assert adapter.applied, adapter.state
        worker = KVConnectorFactory.create_connector("config", Role.WORKER)
        assert adapter.account is None and not vars(worker)
        scheduler = KVConnectorFactory.create_connector(config="config", role=Role.SCHEDULER, kv_cache_config=None)
        assert scheduler.get_num_new_matched_tokens(Request, 8) == (48, False)
        assert scheduler.update_state_after_alloc(Request, [], 40) == "allocated"
        adapter.uninstrument()
    (told,) = [event for event in events if event["kind"] == "offload"]
    assert (told["prompt_tokens"], told["hit_tokens"]) == (64, 40)
    assert not vars(scheduler) and "create_connector" in vars(KVConnectorFactory)
    assert KVConnectorFactory.create_connector("config", Role.SCHEDULER).update_connector_output(None) == "heard"
