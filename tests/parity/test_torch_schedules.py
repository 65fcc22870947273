"""The schedules of torch.distributed.pipelining, exported to CSV by torch, run here and equal one process."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torchs

from fivefold.config.rules import check
from fivefold.errors import UserError
from fivefold.pipeline.of_run import schedule_of_run
from tests.parity.cases import Case

CHUNKS = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}


def exported(kind, file):
    """torch's schedule for two ranks and four microbatches, as a case; its file is written."""
    chunks = CHUNKS[kind]
    what_it_looks_at = {"num_stages": 2 * chunks, "group_size": 2, "group_rank": 0, "is_first": True, "is_last": False}
    stages = [SimpleNamespace(**what_it_looks_at, has_backward=True, submod=None) for _ in range(chunks)]
    theirs = getattr(torchs, kind)(stages if chunks > 1 else stages[0], 4, loss_fn=lambda *_: None)
    if chunks > 1:
        theirs._dump_csv(str(file), format="compute_only")
    else:
        order = theirs._get_pipeline_order()
        lines = [",".join("" if action is None else str(action) for action in order[rank]) for rank in range(2)]
        file.write_text("\n".join(lines))
    return Case("llama-tied", pp=2, schedule=str(file), chunks=chunks, micro=2, steps=2, packed=True)


@pytest.mark.parametrize("kind", CHUNKS)
def test_a_schedule_of_torchs_equals_one_process(harness, kind, tmp_path):
    file = tmp_path / "torch.csv"
    case = exported(kind, file)
    if "1F4" in file.read_text():
        put_right(case, file)
    assert check(case.run, 2) == []
    assert harness.difference(case) is None


def put_right(case, file):
    """torch counts the microbatches of 1F1B's last rank from one, in text alone, for it runs this one by other code."""
    with pytest.raises(UserError, match=r"it has 5 microbatches, but .* = 4"):
        schedule_of_run(case.run)
    text = file.read_text()
    for number in range(4):
        text = text.replace(f"1F{number + 1}", f"1F{number}")
    file.write_text(text)
