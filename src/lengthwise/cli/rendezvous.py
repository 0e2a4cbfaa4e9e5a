"""Where the ranks of one machine meet: a store of torchrun's that listens on the loopback interface alone."""

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

LOOPBACK = "127.0.0.1"
BACKEND = "lengthwise-loopback"
"""The name by which torchrun knows it."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What tells Gloo and NCCL where to listen."""


def meet_on_loopback() -> str:
    """Make torchrun and the ranks it starts meet and talk on the loopback interface; returns the name of the backend.

    Interfaces that the environment names stay as they are named.
    """
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    if BACKEND not in rendezvous_handler_registry._registry:
        rendezvous_handler_registry.register(BACKEND, _creator())
    interfaces = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in INTERFACE_VARIABLES if interfaces else ():
        os.environ.setdefault(variable, interfaces[0])
    return BACKEND


def _creator() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    class Loopback(RendezvousHandler):
        """A new store for every start of the ranks, so that none reads what those before it wrote."""

        use_agent_store = True

        def __init__(self, run_id: str) -> None:
            self._run_id = run_id

        def next_rendezvous(self) -> RendezvousInfo:
            listening = socket.socket()
            listening.bind((LOOPBACK, 0))
            listening.listen(socket.SOMAXCONN)
            port = listening.getsockname()[1]
            store = TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
            self._store = PrefixStore(self._run_id, store)  # the one before ends with its ranks
            return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

        def get_backend(self) -> str:
            return BACKEND

        def get_run_id(self) -> str:
            return self._run_id

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            """Nothing: nobody else could come."""

        def num_nodes_waiting(self) -> int:
            return 0

        def shutdown(self) -> bool:
            return True

    return lambda parameters: Loopback(parameters.run_id)
