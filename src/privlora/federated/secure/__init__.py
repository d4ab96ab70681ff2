"""Secure sums: the server learns the sum of the clients' integer vectors and nothing else of them.

``docs/secure-aggregation.md`` says against whom this holds. ``Participant`` is a client, ``Collector`` the server.
"""

from importlib.util import find_spec

from privlora.errors import ConfigError

for _module, _package in (("cryptography", "cryptography"), ("Crypto", "pycryptodome")):
    if find_spec(_module) is None:
        raise ConfigError(
            f"federated training needs the package {_package}, which is not installed",
            fix="run pip install 'privlora[federated]'",
        )
