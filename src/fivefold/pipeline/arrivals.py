"""What travels between ranks in a schedule, and before which action each receive has to be posted.

Every ordered pair of ranks has its own channel, first in first out: the messages are in the order in which the sender's
actions end, and the receiver posts its receives in that order, none late. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fivefold.pipeline.flow import gives, needs, receiver
from fivefold.pipeline.schedule import Action, Schedule


class Message(NamedTuple):
    """The output of one action on its way to another rank."""

    action: Action
    """The sender's: F gives the input of the stage after, I and B the gradient for the stage before."""
    source: int
    target: int


def channels(schedule: Schedule) -> dict[tuple[int, int], list[Action]]:
    """By (source, target), the actions whose outputs go from rank `source` to rank `target`, in the sender's order."""
    carried: dict[tuple[int, int], list[Action]] = {}
    for rank, action in schedule.all_actions():
        stage = receiver(action, schedule.stages)
        if stage is not None and schedule.placement[stage] != rank:
            carried.setdefault((rank, schedule.placement[stage]), []).append(action)
    return carried


def receives(schedule: Schedule, rank: int) -> list[tuple[Message, ...]]:
    """For each of `rank`'s actions in a sound schedule, the receives that it posts before that action, in their order.

    A receive is posted before the action that precedes the one which needs it, so that the message can arrive
    meanwhile; earlier if a later message of its channel is needed earlier.
    """
    actions = schedule.actions[rank]
    arriving = {source: messages for (source, target), messages in channels(schedule).items() if target == rank}
    places = {gives(action): (source, at) for source, carried in arriving.items() for at, action in enumerate(carried)}
    posted = dict.fromkeys(arriving, 0)

    def due(action: Action) -> Iterator[Message]:
        """Of the channel that brings what `action` needs, everything up to that which is not posted yet."""
        needed = needs(action, schedule.stages)
        if needed is None or needed not in places:
            return
        source, at = places[needed]
        while posted[source] <= at:
            yield Message(arriving[source][posted[source]], source, rank)
            posted[source] += 1

    return [
        tuple(message for action in actions[index + (index > 0) : index + 2] for message in due(action))
        for index in range(len(actions))
    ]
