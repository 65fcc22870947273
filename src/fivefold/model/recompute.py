"""Selective recompute: the outputs of cheap segments are not kept for backward but computed again, each once.

A segment is a function such as a norm. In forward it runs without a graph, and only its inputs are saved. When a later
operation saves one of its outputs, or a view of one, a note is kept instead; the first note that is read in backward
runs the segment again, now with a graph, which the segment's own backward then uses and drops. Nothing here knows of
particular operations: matrix products and attention, which stand outside of segments, are never repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold._torch import StorageReference, storage_reference
from fivefold.model.saved import Pack, Replacement, View

_SAVED = object()
"""Stands for an input that is a tensor, which autograd holds."""


class Scope:
    """The segments of one block's forward. `pack` is autograd's hook while it lasts."""

    def __init__(self, keep: Pack, checked: bool) -> None:
        """`keep` takes what is no output of a segment; `checked` if an earlier forward's segments hid no parameter."""
        self.checked = checked
        self._keep = keep
        self._outputs: dict[StorageReference, _Output] = {}

    def run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """function(*inputs), a tensor or a tuple of tensors, as a segment.

        Parameters that the function uses must be among the inputs: RuntimeError in backward, unless `checked`.
        """
        return _Segment.apply(self, function, *inputs)

    def pack(self, tensor: Tensor) -> Tensor | Replacement:
        """A note if the tensor lies in a segment's output, else what `keep` makes of it."""
        output = self._outputs.get(storage_reference(tensor))
        if output is None or output.view.dtype != tensor.dtype:
            return self._keep(tensor)
        return _Note(output, View.of(tensor))

    def register(self, segment: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        """Know the outputs again. One that shares its memory with an input or another output is kept as usual."""
        known = [storage_reference(x) for x in inputs if isinstance(x, Tensor)]
        memory = [storage_reference(output) for output in outputs]
        for index, (output, reference) in enumerate(zip(outputs, memory, strict=True)):
            if reference not in known and memory.count(reference) == 1:
                self._outputs[reference] = _Output(segment, index, View.of(output))

    def close(self) -> None:
        """Forget all segments. Each saved tensor keeps this scope by its hook, and would keep the segments by it."""
        self._outputs.clear()


@dataclass(frozen=True)
class _Output:
    segment: Any
    index: int
    view: View


@dataclass(frozen=True)
class _Note:
    """A tensor that lies in a segment's output."""

    output: _Output
    view: View

    def tensor(self) -> Tensor:
        """The tensor from the segment's second run, whose output may lie elsewhere in its memory than the first."""
        _, outputs = _second_run(self.output.segment)
        again = outputs[self.output.index].detach()
        if again.stride() != self.output.view.stride:
            again = again.new_empty_strided(again.shape, self.output.view.stride).copy_(again)
        offset = self.view.offset - self.output.view.offset + again.storage_offset()
        return again.as_strided(self.view.size, self.view.stride, offset)


class _Segment(torch.autograd.Function):
    """A function whose graph is made in backward."""

    @staticmethod
    def forward(ctx: Any, scope: Scope, function: Callable[..., Any], *inputs: Any) -> Any:
        outputs = function(*inputs)
        ctx.function, ctx.checked = function, scope.checked
        ctx.inputs = [_SAVED if isinstance(x, Tensor) else x for x in inputs]
        ctx.second_run = None
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.set_materialize_grads(False)
        scope.register(ctx, inputs, _tuple(outputs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, outputs = _second_run(ctx)
        ctx.second_run = None
        given = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        wanted = [x for x in inputs if _wants_gradient(x)]
        found = iter(
            torch.autograd.grad([o for o, _ in given], wanted, [g for _, g in given], allow_unused=True)
            if given
            else [None] * len(wanted)
        )
        return None, None, *(next(found) if _wants_gradient(x) else None for x in inputs)


def _second_run(segment: Any) -> tuple[list[Any], tuple[Tensor, ...]]:
    """Inputs and outputs of the segment, with a graph between them; run at the first call."""
    if segment.second_run is None:
        saved = iter(segment.saved_tensors)
        inputs = [
            next(saved).detach().requires_grad_(wanted) if x is _SAVED else x
            for x, wanted in zip(segment.inputs, segment.needs_input_grad[2:], strict=True)
        ]
        with torch.enable_grad():
            outputs = _tuple(segment.function(*inputs))
        if not segment.checked:
            _refuse_hidden_parameters(segment.function, inputs, outputs)
        segment.second_run = inputs, outputs
    return segment.second_run


def _refuse_hidden_parameters(function: Callable[..., Any], inputs: list[Any], outputs: tuple[Tensor, ...]) -> None:
    """RuntimeError if the graph reaches a leaf that is no input: its gradient would be lost without a word."""
    known = {id(x) for x in inputs}
    nodes, seen = [output.grad_fn for output in outputs], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            name = getattr(function, "__qualname__", repr(function))
            raise RuntimeError(
                f"the cheap segment {name} uses a parameter of shape {tuple(leaf.shape)} that is not among its inputs, "
                "so it would get no gradient: pass it to `cheap`"
            )
        nodes += [following for following, _ in node.next_functions]


def _tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
