"""`--workers N`: several facade processes on one port, and the process that keeps them running.

    parent: reserves the port (SO_REUSEPORT) -> starts the workers -> all listen -> says where
               |                                                                      |
               |    a worker ends: another one takes its place, sooner at first <-----+
               |                                                                      |
               +--- SIGTERM, SIGINT: all workers drain at the same time; exit code 0 <+

The kernel deals connections out to the workers that listen; the parent answers nothing itself. A
worker that ends before it ever listened, at the start, ends all with its exit code. A second signal
is handed on: the workers end their streams at once. When the parent is killed, they are, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress

from prometheus_client.multiprocess import mark_process_dead

from clients.launch.child import Child
from clients.launch.commands import module_command
from clients.launch.supervisor import RestartPolicy
from http_facade.flags import FacadeConfig
from http_facade.listening import CannotListen, reserve

_GRACE_MARGIN_SECONDS = 7.0  # beyond the shutdown timeout, for last words and traces

logger = logging.getLogger(__name__)


class Workers:
    """The processes in the workers' places."""

    def __init__(
        self,
        flags: Sequence[str],
        num_workers: int,
        metrics_directory: str,
        grace_seconds: float,
    ) -> None:
        """`flags`: of each worker. `grace_seconds`: between asking one to end and killing it."""
        self._flags = flags
        self._num_workers = num_workers
        self._metrics_directory = metrics_directory
        self._grace_seconds = grace_seconds
        self._policy = RestartPolicy()
        self._children: list[Child] = []
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()

    def on_signal(self) -> None:
        (self._hurry if self._stopping.is_set() else self._stopping).set()

    async def run(self) -> int:
        """Until a signal; returns the exit code."""
        for index in range(self._num_workers):
            self._children.append(await self._start(index))
        announcing = asyncio.create_task(self._announce())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((announcing, stopping), return_when=asyncio.FIRST_COMPLETED)
        code = announcing.result() if announcing.done() else 0
        if code == 0:
            async with asyncio.TaskGroup() as keepers:
                for index in range(self._num_workers):
                    keepers.create_task(self._keep(index))
                await self._stopping.wait()
                logger.info("stopping: the workers end their requests")
                await self._stop_all()
        else:
            await self._stop_all()
        for task in (announcing, stopping):
            task.cancel()
        return code

    async def _announce(self) -> int:
        """Says where they listen, once all do; 0, or the exit code of one that never did."""
        url = ""
        for child in self._children:
            where = await child.listening()
            if where is None:
                return await child.wait() or 1
            url = where["http"]
        print(json.dumps({"event": "listening", "http": url}), flush=True)
        logger.info("%d workers listen on %s", self._num_workers, url)
        return 0

    async def _start(self, index: int) -> Child:
        arguments = (str(index), self._metrics_directory, *self._flags)
        return await Child.start(module_command("http_facade.worker", *arguments))

    async def _keep(self, index: int) -> None:
        """Another one for each that ends, until all are to end."""
        failures = 0
        while True:
            child = self._children[index]
            code = await child.wait()
            # What it was doing is done no more.
            mark_process_dead(index, self._metrics_directory)  # type: ignore[no-untyped-call]
            if self._stopping.is_set():
                return
            failures = 1 if self._was_steady(child) else failures + 1
            delays = self._policy.delays_seconds
            delay = delays[min(failures, len(delays)) - 1]
            logger.error(
                "worker %d ended with exit code %d; another one in %g s", index, code, delay
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
                return
            self._children[index] = await self._start(index)
            if self._stopping.is_set():
                await self._stop(self._children[index])

    def _was_steady(self, child: Child) -> bool:
        now = asyncio.get_running_loop().time()
        return child.ready_at is not None and now - child.ready_at >= self._policy.steady_seconds

    async def _stop_all(self) -> None:
        await asyncio.gather(*map(self._stop, self._children))

    async def _stop(self, child: Child) -> None:
        await child.stop(self._grace_seconds, self._hurry)


def run_workers(config: FacadeConfig, flags: Sequence[str]) -> int:
    """`flags`: those that `config` was made from. Returns the exit code."""
    if config.edge.api_keys_file is not None:
        logger.warning("limits of API keys are counted in each of the %d workers", config.workers)
    try:
        with (
            closing(reserve(config.host, config.port)) as port,
            tempfile.TemporaryDirectory(prefix="firsttoken-metrics-") as directory,
        ):
            own = (f"--port={port.getsockname()[1]}", "--workers=1")
            grace_seconds = config.shutdown_timeout_seconds + _GRACE_MARGIN_SECONDS
            return asyncio.run(
                _run(Workers((*flags, *own), config.workers, directory, grace_seconds))
            )
    except CannotListen as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


async def _run(workers: Workers) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, workers.on_signal)
    return await workers.run()
