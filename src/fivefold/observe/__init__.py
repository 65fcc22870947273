"""What a person sees of a run: console, metrics and event files, TensorBoard, Weights & Biases."""

from fivefold.observe.events import EventsFile, read_events
from fivefold.observe.metrics import MetricsFile, StepRecord, read_metrics
from fivefold.observe.observer import Observer, open_observer
from fivefold.observe.sinks import require_sinks

__all__ = [
    "EventsFile",
    "MetricsFile",
    "Observer",
    "StepRecord",
    "open_observer",
    "read_events",
    "read_metrics",
    "require_sinks",
]
