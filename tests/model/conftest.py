"""A group of one process, for tests of FSDP and DTensor."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from fivefold.config.run import Parallel
from fivefold.parallel.mesh import Mesh, mesh_of


@pytest.fixture
def one_rank() -> Iterator[Mesh]:
    """The mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield mesh_of(Parallel(), torch.device("cpu"))
    dist.destroy_process_group()
