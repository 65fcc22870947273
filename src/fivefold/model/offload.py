"""Activation offload: what layers keep for backward waits in CPU memory, layer by layer.

The copies travel beside the computation: a layer's leave while the next layer computes forward, and come back while the
layer after it computes backward. So the activations of at most two layers are on the device at a time, and the two that
a stage computed last stay there when backward, which needs them first, begins at once; if a further forward comes first
(pipelines), it sends them after the others.

A layer's device memory is given up when the computing stream has been told to wait for the copy, and it comes from that
stream's own pool: what is free when is a matter of order, not of chance. On a CPU the copies go to other CPU memory.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from fivefold._torch import StorageReference, storage_reference, view_base
from fivefold.kernels.transfer import Event, Lane, wait
from fivefold.model.saved import Replacement, View, keep

T = TypeVar("T")
LEAST_BYTES = {"cuda": 64 * 1024}
"""Memory smaller than this stays where it is, by kind of device: a copy costs more than it frees."""


class Offloader:
    """Moves the activations of one pipeline stage on `device`. CPU memory is kept for the next microbatch and step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = HostMemory(pinned=device.type == "cuda")
        self._out, self._back = Lane(device), Lane(device)
        self._newest: weakref.ref[Parcel] | None = None
        self._leaving: weakref.ref[Parcel] | None = None
        self._arriving: tuple[Event, list[_Item]] | None = None

    def begin_layer(self, first: bool) -> Parcel:
        """The parcel of the layer whose forward begins now; `first` if it is the first of its stage."""
        newest = _alive(self._newest)
        self._release(_alive(self._leaving))
        self._send(newest)
        self._leaving = self._newest
        parcel = Parcel(self, None if first else newest)
        self._newest = weakref.ref(parcel)
        return parcel

    def bring(self, parcel: Parcel) -> None:
        """Have all of the parcel on the device for what is computed from now on, and begin to fetch the one before."""
        self._wait_for_arrivals()
        self._fetch(parcel)
        self._wait_for_arrivals()
        if (previous := _alive(parcel.previous)) is not None:
            self._fetch(previous)

    def _send(self, parcel: Parcel | None) -> None:
        if parcel is None or parcel.opened:
            return
        leaving = [item for item in parcel.items() if item.host is None]
        for item in leaving:
            item.host = self.host.take(len(item.on_device()))
        sent = self._out.copy([(item.on_host(), item.on_device()) for item in leaving])
        for item in leaving:
            item.sent = sent

    def _release(self, parcel: Parcel | None) -> None:
        if parcel is None or parcel.opened:
            return
        for item in parcel.items():
            if item.host is not None:
                wait(item.sent, self.device)
                item.device = None

    def _fetch(self, parcel: Parcel) -> None:
        away = [item for item in parcel.items() if item.device is None]
        for item in away:
            item.device = torch.empty(len(item.on_host()), dtype=torch.uint8, device=self.device)
        pairs = [(item.on_device(), item.on_host()) for item in away]
        self._arriving = self._back.copy(pairs, after=[item.sent for item in away]), away

    def _wait_for_arrivals(self) -> None:
        """Items are held until then: memory that is still being written must not be used for anything else."""
        if self._arriving is not None:
            wait(self._arriving[0], self.device)
            self._arriving = None


class Parcel:
    """What one layer keeps of one forward. `pack` is autograd's hook during that forward.

    It lives as long as something that it stands for is still to be read, and each part of it just as long by itself.
    """

    def __init__(self, offloader: Offloader, previous: Parcel | None) -> None:
        self.previous = None if previous is None else weakref.ref(previous)
        self.opened = False
        self._offloader = offloader
        self._least = LEAST_BYTES.get(offloader.device.type, 1)
        self._items: dict[StorageReference, weakref.ref[_Item]] = {}
        self._of_forward: dict[StorageReference, weakref.ref[_Item]] = {} if previous is None else previous._of_forward

    def pack(self, tensor: Tensor) -> Tensor | Replacement:
        """A ticket for the tensor; itself if it is a parameter, small, or elsewhere."""
        small = tensor.untyped_storage().nbytes() < self._least
        if small or tensor.device != self._offloader.device or _is_parameter(tensor):
            return keep(tensor)
        return _Ticket(self, self._item_of(tensor), View.of(tensor))

    def items(self) -> list[_Item]:
        """Those that are still needed."""
        return [item for item in map(_alive, self._items.values()) if item is not None]

    def open(self) -> None:
        """Bring all of it back, the first time that backward wants something of it."""
        if not self.opened:
            self.opened = True
            self._offloader.bring(self)

    def _item_of(self, tensor: Tensor) -> _Item:
        """One for each piece of memory, also if tensors in it are saved more than once, or by several layers."""
        reference = storage_reference(tensor)
        item = _alive(self._of_forward.get(reference))
        if item is None:
            item = _Item(tensor, self._offloader.host)
            self._of_forward[reference] = weakref.ref(item)
        self._items[reference] = weakref.ref(item)
        return item


class HostMemory:
    """CPU memory by size, taken and given back; pinned, and so allocated once, for transfers to and from a GPU.

    Nothing need be waited for: who takes memory copies to it on the lane that filled it before, after all computing
    that was queued by then, and that had waited for what was fetched from it.
    """

    def __init__(self, pinned: bool) -> None:
        self.bytes = 0  # of all memory, in use or not
        self._pinned = pinned
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def take(self, size: int) -> Tensor:
        """`size` bytes."""
        if self._free[size]:
            return self._free[size].pop()
        self.bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def give(self, memory: Tensor) -> None:
        """Give back what was taken."""
        self._free[len(memory)].append(memory)


class _Item:
    """The memory of one or more saved tensors: on the device, in CPU memory, or both. Bytes."""

    def __init__(self, tensor: Tensor, pool: HostMemory) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.device: Tensor | None = flat.set_(tensor.untyped_storage())
        self.host: Tensor | None = None
        self.sent: Event = None
        self._pool = pool

    def on_device(self) -> Tensor:
        assert self.device is not None, "read before it was fetched"
        return self.device

    def on_host(self) -> Tensor:
        assert self.host is not None, "fetched before it was sent"
        return self.host

    def __del__(self) -> None:
        if self.host is not None:
            self._pool.give(self.host)


@dataclass(frozen=True)
class _Ticket:
    """A saved tensor in a parcel."""

    parcel: Parcel
    item: _Item
    view: View

    def tensor(self) -> Tensor:
        self.parcel.open()
        return self.view.on(self.item.on_device().untyped_storage())


def _alive(reference: weakref.ref[T] | None) -> T | None:
    return None if reference is None else reference()


def _is_parameter(tensor: Tensor) -> bool:
    """FSDP manages parameters' memory itself; a product may save a transposed view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(view_base(tensor), nn.Parameter)
