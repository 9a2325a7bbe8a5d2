"""A port for ranks to meet at."""

import random
import socket


def free_port():
    """A port that was free a moment ago, and the next one with it, which longspan takes after MASTER_PORT.
    It lies below the ports that Linux assigns to connections: one of those could be taken meanwhile."""
    while True:
        port = random.randrange(10000, 32000)
        try:
            with socket.socket() as first, socket.socket() as second:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
                return port
        except OSError:
            continue
