"""The variables by which launchers tell a process its place in the job."""

from __future__ import annotations

import os
from typing import Any

from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.context import Context


def install(patches: Patches, context: Context) -> None:
    patches.environ(_torchrun(context))
    _patch_others(patches, context)


def _torchrun(c: Context) -> dict[str, str]:
    nodes = -(-c.world // c.node)
    values: dict[str, Any] = {
        "RANK": c.rank,
        "WORLD_SIZE": c.world,
        "LOCAL_RANK": c.local_rank,
        "LOCAL_WORLD_SIZE": min(c.node, c.world - c.node_rank * c.node),
        "GROUP_RANK": c.node_rank,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": c.rank,
        "ROLE_WORLD_SIZE": c.world,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return {k: str(v) for k, v in values.items()}


def _others(c: Context) -> dict[str, str]:
    """Names of other launchers. They are answered only to a script that asks for its rank this way."""
    local = min(c.node, c.world - c.node_rank * c.node)
    nodes = -(-c.world // c.node)
    values: dict[str, Any] = {
        "SLURM_PROCID": c.rank,
        "SLURM_NTASKS": c.world,
        "SLURM_NPROCS": c.world,
        "SLURM_LOCALID": c.local_rank,
        "SLURM_NODEID": c.node_rank,
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS_PER_NODE": local,
        "SLURM_TASKS_PER_NODE": local,
        "SLURM_GPUS_ON_NODE": local,
        "SLURM_GPUS_PER_NODE": local,
        "SLURM_JOB_ID": 1,
        "SLURM_JOBID": 1,
        "SLURM_NODELIST": "localhost",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
        "OMPI_COMM_WORLD_RANK": c.rank,
        "OMPI_COMM_WORLD_SIZE": c.world,
        "OMPI_COMM_WORLD_LOCAL_RANK": c.local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": local,
        "OMPI_COMM_WORLD_NODE_RANK": c.local_rank,
        "PMI_RANK": c.rank,
        "PMI_SIZE": c.world,
        "PMI_LOCAL_RANK": c.local_rank,
        "PMI_LOCAL_SIZE": local,
        "MV2_COMM_WORLD_RANK": c.rank,
        "MV2_COMM_WORLD_SIZE": c.world,
        "MV2_COMM_WORLD_LOCAL_RANK": c.local_rank,
        "MV2_COMM_WORLD_LOCAL_SIZE": local,
    }
    return {k: str(v) for k, v in values.items()}


_MAPPING = ("os.py", "_collections_abc.py", "<frozen os>", "<frozen _collections_abc>")
_RANKS = {  # a launcher's variable for the rank, by the beginning of all its names
    "SLURM_": "SLURM_PROCID",
    "OMPI_": "OMPI_COMM_WORLD_RANK",
    "PMI_": "PMI_RANK",
    "MV2_": "MV2_COMM_WORLD_RANK",
}


def _patch_others(patches: Patches, context: Context) -> None:
    """A script that reads RANK was launched by torchrun and never gets here; one that reads its rank
    from Slurm or MPI finds all of those names from then on."""
    kind = type(os.environ)
    get = kind.__getitem__
    values = _others(context)
    found: set[str] = set()

    def __getitem__(self: Any, key: Any) -> Any:
        try:
            return get(self, key)
        except KeyError:
            launcher = next((p for p in _RANKS if isinstance(key, str) and key.startswith(p)), None)
            if launcher is None or key not in values:
                raise
            if not context.callers.user_asks(through=_MAPPING):
                raise
            if key == _RANKS[launcher] or key.endswith(("LOCALID", "LOCAL_RANK", "NTASKS", "WORLD_SIZE")):
                found.add(launcher)
            if launcher not in found:
                raise
            return values[key]

    patches.set(kind, "__getitem__", __getitem__)
