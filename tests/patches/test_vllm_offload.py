"""vLLM's scheduler side: the factory's connector is watched where the scheduler asked for it, and nowhere else."""

import enum
import time
import types

from kvprobe.instrument import event_log
from kvprobe.instrument.benefit import BenefitTotals
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


def wait_module():
    class OffloadingConnectorWorker:
        def start_kv_transfers(self, metadata):
            return "started"

    module = types.ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker")
    OffloadingConnectorWorker.__module__ = module.__name__
    OffloadingConnectorWorker.__qualname__ = "OffloadingConnectorWorker"
    module.OffloadingConnectorWorker = OffloadingConnectorWorker
    return module


def jobs(*sync):
    return types.SimpleNamespace(load_jobs={n: types.SimpleNamespace(sync=one) for n, one in enumerate(sync)})


def test_steps_that_wait_for_loads_of_their_own_are_counted_by_the_worker_of_the_first_rank():
    waits = []
    for rank in (0, 1):
        module = wait_module()
        adapter = Offload()
        assert adapter.prepare(("vllm", "0.33.0"), "off")
        config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(rank=rank))
        with event_log.subscribed() as events:
            adapter.instrument(module)
            hook = adapter.around_create(None)
            hook(Connector, None, config, Role.WORKER)
            worker = module.OffloadingConnectorWorker()
            for metadata in (jobs(), jobs(False), jobs(False, True), jobs(True), types.SimpleNamespace(load_jobs=None)):
                assert worker.start_kv_transfers(metadata) == "started"
            assert adapter.applied, adapter.state
            adapter.uninstrument()
        waits += [(e["source"], e["waits"], e["waited_ns"] >= 0) for e in events if e["kind"] == "offload"]
    assert waits == [("Connector", 2, True)]


def test_a_step_that_waited_for_loads_of_its_own_does_not_tell_what_prefill_costs():
    adapter = Offload()
    adapter.account = BenefitTotals("vllm.offload", "connector")
    scheduler = object()
    for own in (False, True, False):
        output = types.SimpleNamespace(num_scheduled_tokens={"a": 100}, has_sync_kv_loads=own)
        adapter.scheduled(time.monotonic_ns(), output, (scheduler,), {})
        adapter.stepped(time.monotonic_ns(), None, (scheduler, output), {})
    assert len(adapter.account._steps) == 2
