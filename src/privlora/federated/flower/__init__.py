"""Federated training over Flower (flwr 1.41, Message API): it carries the messages, and the core does the rest.

``records`` puts messages into Flower's records, ``grid`` carries them, ``server_app`` and ``client_app`` are what
Flower starts, ``simulation`` starts both in one process, ``app`` writes a folder for ``flwr run``. Nothing here opens
a connection: that is Flower's.
"""

import os
from importlib.util import find_spec
from typing import Final

from privlora.errors import ConfigError

QUIET: Final = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment in which neither Flower nor Ray calls its makers. An own choice of the user's stands."""

if find_spec("flwr") is None:
    raise ConfigError(
        "federated training over Flower needs the package flwr, which is not installed",
        fix="run pip install 'privlora[federated]'",
    )
for _name, _value in QUIET.items():  # before flwr is imported: it reads them once
    os.environ.setdefault(_name, _value)
