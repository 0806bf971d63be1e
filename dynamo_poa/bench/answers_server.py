"""`python -m dynamo_poa.bench.answers_server CHUNKS INTERVAL_S`: an HTTP server that streams made-up answers.

Owns: what an answer consists of and when each chunk is sent. Prints its port, then serves until killed.
Does not own: what is measured with it (client.py).
Invariant: it ends with whoever started it, however that ends.
Source: chunks as Dynamo 1.4.2's frontend sends them, one packet each, with the chosen workers in each.
"""

import argparse
import asyncio
import ctypes
import signal
import sys
from typing import cast

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CHUNK = (
    b'data: {"id":"cmpl-921814e2-2312-4275-bf0c-db3fc4b9cb65","choices":[{"text":" dulogi","index":0}],'
    b'"created":1795980224,"model":"mock-llama-3.1-70b","system_fingerprint":null,"object":"text_completion",'
    b'"usage":null,"nvext":{"worker_id":{"prefill_worker_id":12845593608478749393,"prefill_dp_rank":0,'
    b'"decode_worker_id":16978310938698329940,"decode_dp_rank":0}}}\n\n'
)
_DONE = b"data: [DONE]\n\n"
_PR_SET_PDEATHSIG = 1  # prctl(2)


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Answer(asyncio.Protocol):
    """One connection, one request, one answer."""

    def __init__(self, chunks: int, interval_s: float) -> None:
        self._left, self._interval_s, self._seen = chunks, interval_s, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        head, end, body = self._seen.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.rpartition(b"Content-Length: ")[2].split(b"\r\n")[0]):
            self._transport.write(_HEAD)
            self._next()

    def _next(self) -> None:
        if self._transport.is_closing():
            return
        if not self._left:
            self._transport.write(_framed(_DONE) + b"0\r\n\r\n")
            self._transport.close()
            return
        self._left -= 1
        self._transport.write(_framed(_CHUNK))
        asyncio.get_running_loop().call_later(self._interval_s, self._next)


async def _serve(chunks: int, interval_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Answer(chunks, interval_s), "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="dynamo_poa.bench.answers_server")
    parser.add_argument("chunks", type=int)
    parser.add_argument("interval_s", type=float)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    uvloop.run(_serve(arguments.chunks, arguments.interval_s))


if __name__ == "__main__":
    main()
