"""P2, the engine service: binds its ports, starts the core, serves, drains.

start   start core -> read tokenizer -> bind ports ("bound") -> core is ready -> SERVING
drain   NOT_SERVING -> refuse new -> finish within grace -> fail the rest -> core, traces, exit
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from access.certificates import CertificateError
from access.exposure import is_loopback, open_door_warning
from access.keys_file import KeysFileError
from engine_service.addresses import check_address, join_address
from engine_service.callers import Callers, KeyInterceptor
from engine_service.config import ServiceConfig
from engine_service.constraint_checker import ConstraintChecker
from engine_service.control_servicer import ControlServicer
from engine_service.core_launcher import CoreLauncher, open_launcher
from engine_service.core_supervisor import CoreStartError, CoreSupervisor
from engine_service.engine_actor import EngineActor
from engine_service.engine_info import EngineInfo
from engine_service.errors import EngineUnavailable
from engine_service.health import HealthServicer, report_health
from engine_service.model_error import ModelError
from engine_service.prompt_tokenizer import PromptTokenizer
from engine_service.served_model import sampling_defaults
from engine_service.service_metrics import MetricsServer, ServiceMetrics
from engine_service.servicer import EngineServicer
from engine_service.slow_traces import SlowTraces
from engine_service.tls import server_credentials
from engine_service.tokenizer_files import TokenizerFiles
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc as pb_grpc
from traces.setup import Tracing, configure_tracing

logger = logging.getLogger(__name__)

EXIT_BAD_CONFIGURATION: Final = 2
_LAST_WORDS_SECONDS: Final = 1.0  # for the statuses of calls that are ended


class ServiceStartError(Exception):
    """A full sentence for the person at the command line."""

    def __init__(self, message: str, exit_code: int = EXIT_BAD_CONFIGURATION) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineService:
    """Use as `async with`: entering starts it, leaving drains and stops it."""

    def __init__(
        self,
        config: ServiceConfig,
        launcher: CoreLauncher | None = None,
        on_bound: Callable[[EngineService], None] = lambda _: None,
    ) -> None:
        """`launcher` starts the cores; none: one as the configuration says. `on_bound` is called
        once the addresses are known; the core may still load then, and calls that need it are
        refused."""
        self._config = config
        self._launcher = launcher
        self._on_bound = on_bound
        self._cleanup = AsyncExitStack()
        self._forced = asyncio.Event()
        self.stop_requested = asyncio.Event()  # by a signal or by Control.Drain
        self.grpc_address = ""
        self.metrics_address = ""
        self.actor: EngineActor

    async def __aenter__(self) -> EngineService:
        try:
            await self._start()
        except BaseException:
            await self._cleanup.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._drain()
        finally:
            await self._cleanup.aclose()

    def force(self) -> None:
        """Cuts a drain short."""
        self._forced.set()

    # ------------------------------------------------------------ start

    async def _start(self) -> None:
        config = self._config
        tracing = self._start_tracing()
        try:  # first: it is checked at once, and a core takes seconds
            callers, credentials = Callers(config), server_credentials(config.edge)
        except (KeysFileError, CertificateError) as error:
            raise ServiceStartError(str(error)) from error
        files = await asyncio.to_thread(TokenizerFiles.read, Path(config.core.model.model_dir))
        try:
            sampling_defaults(config.core.model, files)
        except ModelError as error:
            raise ServiceStartError(str(error)) from error
        metrics = ServiceMetrics(config.core.model.served_model_name)
        self.actor = EngineActor(config.core.scheduler, metrics, config.stall_timeout_seconds)
        launcher = self._launcher or await open_launcher(config)
        supervisor = CoreSupervisor(config.core, launcher, self.actor, config.stall_restart_seconds)
        info = EngineInfo(config.core, files, supervisor)
        self._cleanup.push_async_callback(supervisor.stop)
        supervisor.start(on_ready=info.core_is_known)  # it takes the longest: the rest beside it
        tokenizer = await self._read_tokenizer(files)
        metrics.watch_tracing(lambda: tracing.num_dropped_spans)
        self._start_metrics(metrics)
        checker = ConstraintChecker()
        self._cleanup.callback(checker.close)
        servicer = EngineServicer(
            self.actor,
            info,
            files,
            tokenizer,
            checker,
            callers,
            config.slow_reader_timeout_seconds,
            tracing,
            SlowTraces(tracing, config.trace_slow_ttft_ms / 1000),
        )
        await self._start_grpc(servicer, callers, credentials)
        self._on_bound(self)
        try:
            ready = await supervisor.first_ready()
        except CoreStartError as error:
            raise ServiceStartError(str(error), error.exit_code) from error
        logger.info(
            "serving %s on %s, core %d",
            config.core.model.served_model_name,
            ready.device,
            ready.pid,
        )

    def _start_tracing(self) -> Tracing:
        config = self._config
        tracing = configure_tracing(
            "firsttoken-engine",
            directory=config.trace_dir,
            otlp_endpoint=config.otlp_traces_endpoint,
            sample_ratio=config.trace_sample_ratio,
            holds=config.trace_slow_ttft_ms > 0,
            trusts_callers=True,
        )
        self._cleanup.push_async_callback(asyncio.to_thread, tracing.shutdown)
        return tracing

    async def _read_tokenizer(self, files: TokenizerFiles) -> PromptTokenizer:
        try:
            tokenizer = await asyncio.to_thread(
                PromptTokenizer, files.content("tokenizer.json") or b""
            )
        except ModelError as error:
            raise ServiceStartError(str(error)) from error
        self._cleanup.callback(tokenizer.close)
        return tokenizer

    def _start_metrics(self, metrics: ServiceMetrics) -> None:
        host, port = self._config.grpc_host, self._config.metrics_port
        try:
            server = MetricsServer(metrics.registry, host, port)
        except OSError as error:
            raise _cannot_listen(host, port, error, "--engine-metrics-port") from error
        self._cleanup.push_async_callback(asyncio.to_thread, server.close)
        self.metrics_address = join_address(host, server.port)

    async def _start_grpc(
        self,
        servicer: EngineServicer,
        callers: Callers,
        credentials: grpc.ServerCredentials | None,
    ) -> None:
        host, port = self._config.grpc_host, self._config.grpc_port
        server = grpc.aio.server(
            options=_server_options(self._config.max_message_bytes),
            interceptors=[KeyInterceptor(callers)] if callers.keys.is_required else None,
        )
        health = HealthServicer()
        control = ControlServicer(self.actor, callers, self.stop_requested.set)
        pb_grpc.add_EngineServicer_to_server(servicer, server)
        pb_grpc.add_ControlServicer_to_server(control, server)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        services = [
            *(service.full_name for service in pb.DESCRIPTOR.services_by_name.values()),
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        ]
        reflection.enable_server_reflection(services, server)
        try:
            check_address(host, port)
            port = _add_port(server, join_address(host, port), credentials)
        except (OSError, RuntimeError) as error:
            raise _cannot_listen(host, port, error, "--grpc-port") from error
        self.grpc_address = join_address(host, port)
        await server.start()
        self._cleanup.push_async_callback(server.stop, _LAST_WORDS_SECONDS)
        if not is_loopback(host) and not callers.keys.is_required:
            logger.warning(open_door_warning("ENGINE", host))
        following = asyncio.create_task(callers.keys.follow_file())
        self._cleanup.callback(following.cancel)
        reporting = asyncio.create_task(report_health(self.actor, health))
        self._cleanup.callback(reporting.cancel)

    # ------------------------------------------------------------ the end

    async def _drain(self) -> None:
        """Returns when nothing lives any more, the grace is over, or somebody forces it."""
        self.actor.drain()
        waits = [
            asyncio.create_task(self.actor.wait_idle()),
            asyncio.create_task(self._forced.wait()),
        ]
        await asyncio.wait(
            waits,
            timeout=self._config.shutdown_timeout_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for wait in waits:
            wait.cancel()
        self.actor.fail_all(EngineUnavailable("the engine is shutting down"))


def _add_port(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None
) -> int:
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def _cannot_listen(host: str, port: int, error: Exception, flag: str) -> ServiceStartError:
    why = error.strerror if isinstance(error, OSError) else "refused"
    return ServiceStartError(
        f"can't listen on {join_address(host, port)}: {why}; choose another with {flag}"
    )


def _server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Clients may ping every 10 s, also without a call; a little earlier is no offence.
        ("grpc.http2.min_ping_interval_without_data_ms", 9_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A peer that vanished without a word is noticed within 80 s.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


async def run(config: ServiceConfig, launcher: CoreLauncher | None = None) -> int:
    """Serves until SIGTERM, SIGINT or Control.Drain; a second signal cuts the drain short.
    Returns the exit code."""
    service = EngineService(
        config, launcher, on_bound=lambda service: _announce("bound", service, config)
    )
    stop, signalled = service.stop_requested, asyncio.Event()
    serving = asyncio.current_task()
    is_started = False

    def on_signal() -> None:
        if signalled.is_set():
            service.force()
        elif not is_started and serving is not None:
            serving.cancel()
        signalled.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        async with service:
            is_started = True
            _announce("listening", service, config)
            await stop.wait()
            logger.info("draining for at most %s s", config.shutdown_timeout_seconds)
    except ServiceStartError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    return 0


def _announce(event: str, service: EngineService, config: ServiceConfig) -> None:
    """The only lines on stdout, for whoever started this process: "bound" when clients may be
    told where to connect, "listening" when it serves."""
    line = {
        "event": event,
        "grpc": service.grpc_address,
        "metrics": service.metrics_address,
        "model": config.core.model.served_model_name,
    }
    print(json.dumps(line), flush=True)
