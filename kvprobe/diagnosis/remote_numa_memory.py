"""Host memory that copies use lies on another NUMA node than the GPU.

Mechanism: each byte crosses the link between the sockets before it crosses the link of the GPU. Public reports say that
these copies are 1.5 to 3 times slower. These copies also take the link between the sockets from everybody else.

Signature: of the bytes that were copied from and to host memory, at least a fifth, and at least 64 MB, lie on a node
that no GPU of the machine is attached to. If GPUs are attached to every node, kvprobe cannot tell which GPU a copy
used.

Needs: the node of the memory (on machines with several nodes, `kvprobe run` asks for the node of one page of each
allocation) and the node of each GPU.

Time lost: kvprobe states none, because without executions the time is not known. Predicted saving: kvprobe predicts
none.
"""

from __future__ import annotations

from kvprobe.diagnosis.finding import COUNTED, Change, Evidence, Finding, Loss, NotLookedFor, cause_of
from kvprobe.diagnosis.joined import JoinedRecording, share, size

CAUSE = cause_of(__name__)
LEAST_BYTES, LEAST_SHARE = 64 << 20, 0.2


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Needs the nodes of memory and GPUs."""
    machine = joined.recording.machine
    if machine.get("host_bytes_by_node") and machine.get("gpu_nodes"):
        return None
    return NotLookedFor(
        "the recording does not tell on which NUMA node host memory and the GPU are",
        "kvprobe run, on a machine of several nodes",
    )


def find(joined: JoinedRecording) -> Finding | None:
    """Bytes on nodes without a GPU."""
    machine = joined.recording.machine
    nodes, gpus = list(machine["host_bytes_by_node"]), list(machine["gpu_nodes"])
    far = sum(size for node, size in enumerate(nodes) if node not in gpus)
    if far < LEAST_BYTES or far < LEAST_SHARE * sum(nodes):
        return None
    where = ", ".join(f"node {node}: {size(held)}" for node, held in enumerate(nodes) if held)
    return joined.finding(
        CAUSE,
        f"{size(far)} were copied from or to memory on another NUMA node than the GPU",
        "likely",
        Loss(0, 0, on="none", window=joined.window, places=()),
        severity="warning",
        evidence=(
            Evidence(
                f"{share(far, sum(nodes))} of the copied host memory is on a node without a GPU ({where}; GPUs on "
                f"{', '.join(map(str, gpus))})",
                far,
                "bytes",
                COUNTED,
            ),
        ),
        cure=(
            Change(
                "Start with numactl --cpunodebind=N --membind=N for the GPU's node, or set a memory policy before the "
                "pool is allocated",
                "setting",
                "numactl",
            ),
            Change("Touch the pool's pages from a thread that runs on the GPU's node, before they are pinned"),
        ),
    )
