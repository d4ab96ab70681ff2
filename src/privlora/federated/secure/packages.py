"""Imported before what needs them: says how to install the packages of secure sums where they are missing."""

from importlib.util import find_spec

from privlora.errors import ConfigError

for _module, _package in (("cryptography", "cryptography"), ("Crypto", "pycryptodome")):
    if find_spec(_module) is None:
        raise ConfigError(
            f"federated training needs the package {_package}, which is not installed",
            fix="run pip install 'privlora[federated]'",
        )
