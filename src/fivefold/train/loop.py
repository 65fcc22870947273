"""The train loop: read this first.

Each turn takes one global batch, computes its gradient, updates the weights, and does what is due: reporting (one step
late, so that the device is never waited for), validation, a checkpoint, stopping.
"""

from __future__ import annotations

from fivefold.config.run import Run
from fivefold.optim.schedule import learning_rate
from fivefold.parallel.mesh import Mesh
from fivefold.train.opening import open_job
from fivefold.train.options import TrainOptions
from fivefold.train.signals import stop_on_signals
from fivefold.train.step import train_step


def train(run: Run, mesh: Mesh, options: TrainOptions) -> int:
    """Train `run` as one rank of `mesh`, from its newest checkpoint if there is one. Returns the exit code."""
    with stop_on_signals() as wish, open_job(run, mesh, options) as job:
        if job is None:
            return 0
        if job.progress.step == 0 and job.validation_due():
            job.validate()
        if not job.ended():
            job.meter.resume_clock()
            for batch in job.loader:
                lr = learning_rate(run.optim, job.progress.step + 1, job.run.total_steps)
                with job.watched(batch):
                    result = train_step(job.pipeline, batch, job.optimizer, mesh, lr=lr, clip=run.optim.clip)
                job.progress.advance(batch, run.data.seq_len)
                job.report(job.meter.push(job.progress, lr, result, asks=(bool(wish), job.save_overdue())))

                validate, save, end = job.validation_due(), job.save_due(), job.ended()
                if validate or save or end:
                    job.report(job.meter.flush())
                if validate:
                    job.validate()
                if save:
                    job.save()
                if end:
                    break
                if validate or save:
                    job.meter.resume_clock()
        job.finish(wish)
    return 0
