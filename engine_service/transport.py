"""How actor (P2) and core (P1) exchange frames: a socket pair between processes, or a thread.

    actor  --list[Command]-->  core        one frame a loop iteration
    actor  <-----Frame-------  core        one frame a step

On the wire a frame is its length (4 bytes, little-endian) and msgpack. Neither side ever waits
for the other: the core writes from a thread of its own, the actor into its transport's buffer.
What piles up is bounded by what the actor admitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import socket
import struct
import threading
from collections import deque
from typing import Final, Protocol, cast

import msgspec

from engine_service.mailbox import Mailbox
from engine_service.messages import Command, Frame

_LENGTH: Final = struct.Struct("<I")
_RECEIVE_BYTES: Final = 1 << 20

encode_frame: Final = msgspec.msgpack.Encoder().encode
decode_commands: Final = msgspec.msgpack.Decoder(list[Command]).decode
decode_frame: Final = msgspec.msgpack.Decoder(Frame).decode

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------- the core's side


class CoreChannel(Protocol):
    """What the step loop sees of the actor."""

    @property
    def mailbox(self) -> Mailbox: ...

    def send(self, frame: Frame) -> None:
        """Hands the frame over; never blocks, never fails. A dead actor closes the mailbox."""


class SocketChannel:
    """A receiver thread fills the mailbox, a writer thread empties the queue of frames.

    Neither thread outlives the other's use: whichever ends, for whatever reason, closes the
    mailbox, which ends the core, and hangs up, so that the actor knows at once.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.mailbox = Mailbox()
        self._socket = sock
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._receiver = threading.Thread(target=self._receive, name="receiver", daemon=True)
        self._writer = threading.Thread(target=self._write, name="writer", daemon=True)
        self._receiver.start()
        self._writer.start()

    def send(self, frame: Frame) -> None:
        self._frames.put(frame)

    def close(self) -> None:
        """Writes what was sent, then hangs up."""
        self._frames.put(None)
        self._writer.join()
        self._hang_up()
        self._receiver.join()
        self._socket.close()

    def _receive(self) -> None:
        buffer = bytearray()
        try:
            while chunk := self._socket.recv(_RECEIVE_BYTES):
                buffer += chunk
                for payload in _take_payloads(buffer):
                    self.mailbox.put(decode_commands(payload))
        except OSError:
            pass
        except Exception:
            logger.exception("the engine core cannot read what it is sent")
            self.mailbox.close()  # before the other side can know
            self._hang_up()
        finally:
            self.mailbox.close()

    def _write(self) -> None:
        try:
            while (frame := self._frames.get()) is not None:
                payload = encode_frame(frame)
                self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError:
            pass  # the other side hung up
        except Exception:
            logger.exception("the engine core cannot write what it has to say")
            self._hang_up()
        finally:
            self.mailbox.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # the other side hung up first
            self._socket.shutdown(socket.SHUT_RDWR)


def _take_payloads(buffer: bytearray) -> list[bytes]:
    """Removes all complete frames from the front of `buffer`."""
    payloads: list[bytes] = []
    start = 0
    while len(buffer) - start >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer, start)
        end = start + _LENGTH.size + length
        if len(buffer) < end:
            break
        payloads.append(bytes(buffer[start + _LENGTH.size : end]))
        start = end
    del buffer[:start]
    return payloads


# ---------------------------------------------------------------- the actor's side


class CoreConnection(Protocol):
    """What the actor sees of the core; used on one event loop."""

    def send(self, commands: list[Command]) -> None:
        """Never waits; after the core's death it does nothing."""

    async def receive(self) -> Frame | None:
        """The next frame; None once the core is gone. One caller at a time."""

    async def close(self) -> None: ...


class SocketConnection(asyncio.Protocol):
    """A protocol, not a stream: one wake-up a frame, where a stream takes two or more."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()  # the beginning of a frame
        self._payloads: deque[bytes] = deque()  # whole frames, not yet received
        self._arrival: asyncio.Future[None] | None = None  # what `receive` waits for
        self._lost = self._loop.create_future()  # why is no news

    @classmethod
    async def open(cls, sock: socket.socket) -> SocketConnection:
        sock.setblocking(False)
        _, connection = await asyncio.get_running_loop().create_connection(cls, sock=sock)
        return connection

    def send(self, commands: list[Command]) -> None:
        if self._transport.is_closing():
            return
        payload = encode_frame(commands)
        self._transport.write(_LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> Frame | None:
        while not self._payloads:
            if self._lost.done():
                return None
            self._arrival = self._loop.create_future()
            await self._arrival
        return decode_frame(self._payloads.popleft())

    async def close(self) -> None:
        self._transport.close()
        await asyncio.shield(self._lost)

    # ------------------------------------------------------------ for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if payloads := _take_payloads(self._buffer):
            self._payloads.extend(payloads)
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set_result(None)
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


# ---------------------------------------------------------------- both in one process


class ThreadChannel:
    """The core's side when the core is a thread of the actor's process."""

    def __init__(self, connection: ThreadConnection) -> None:
        self.mailbox = Mailbox()
        self._connection = connection

    def send(self, frame: Frame) -> None:
        self._connection.deliver(frame)

    def close(self) -> None:
        """The core's last word."""
        self._connection.deliver(None)


class ThreadConnection:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue()
        self.channel = ThreadChannel(self)

    def deliver(self, frame: Frame | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._frames.put_nowait, frame)
        except RuntimeError:
            self.channel.mailbox.close()  # the actor's loop is closed

    def send(self, commands: list[Command]) -> None:
        self.channel.mailbox.put(commands)

    async def receive(self) -> Frame | None:
        return await self._frames.get()

    async def close(self) -> None:
        self.channel.mailbox.close()
