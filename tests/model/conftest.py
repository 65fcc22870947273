"""A group of one process, for tests of FSDP and DTensor."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fivefold.parallel.mesh import Mesh


@pytest.fixture
def one_rank() -> Iterator[Mesh]:
    """The mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dense = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    yield Mesh(rank=0, world=1, device=torch.device("cpu"), dense=dense)
    dist.destroy_process_group()
