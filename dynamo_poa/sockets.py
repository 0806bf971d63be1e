"""When the other end of a connection counts as lost although it has said nothing.

Owns: the socket options by which the kernel notices a machine or a path that has vanished.
Does not own: what is done about it.
Source: Linux tcp(7). A process that dies closes its connections; a machine that vanishes does not, and
        without these options a connection to it stays for hours.
"""

import asyncio
import socket

# Discovery drops a vanished machine's workers after 10 s: be no slower.
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


def notice_loss(transport: asyncio.BaseTransport, unread_s: float) -> None:
    """Have a connection end when its other end has vanished.

    Args:     unread_s: for how long bytes of ours may stay unread or unacknowledged. To the kernel an
              end that is there and does not read looks the same: this bounds the patience with slow ones too.
    """
    sock = transport.get_extra_info("socket")
    for level, option, value in _OPTIONS:
        sock.setsockopt(level, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unread_s * 1000))
