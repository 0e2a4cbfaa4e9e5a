"""Build parts in worker processes that end with their parent, however it ends."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from lengthwise.core.errors import LengthwiseError
from lengthwise.core.processes import follow_parent, interrupts_later
from lengthwise.index.build_part import PartJob, build_part
from lengthwise.index.source_file import WorkUnit


def build_parts(job: PartJob, units: list[WorkUnit], *, workers: int, on_done: Callable[[int], None]) -> None:
    """Build the parts of ``units``; ``on_done`` hears how many are finished. The first error in order is raised."""
    workers = min(workers, len(units))
    if workers <= 1:
        for number, unit in enumerate(units, 1):
            build_part(job, unit)
            on_done(number)
        return
    # A fresh interpreter per worker: a fork would copy the tokenizer's thread pool in a broken state.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        with interrupts_later():
            futures = [pool.submit(build_part, job, unit) for unit in units]
        for number, future in enumerate(futures, 1):
            future.result()
            on_done(number)
    except BrokenProcessPool:
        raise LengthwiseError(
            "a worker of the index build was killed, perhaps for want of memory; finished parts are kept: "
            "run the same command again with fewer --workers"
        ) from None
    except BaseException:
        for worker in list((pool._processes or {}).values()):  # Python 3.14 has pool.terminate_workers()
            worker.terminate()  # rather than wait for the parts that they are at
        raise
    finally:
        with interrupts_later():  # another one would leave workers behind that this process waits for
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
    follow_parent()
