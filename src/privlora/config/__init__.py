"""Settings of one run: one YAML file with six groups (more for a federation, public texts, or what is auto).

Each field is documented below it.

Precedence: defaults, then the file, then ``group.key=value`` on the command line. Unknown keys and
contradictions are errors. A run keeps its own in ``private/config.resolved.yaml``, because they name its files;
what they say of method and privacy is public, and stands in the report.
"""

from privlora.config.auto import AutoSettings
from privlora.config.federation import ClientSettings, FederationSettings
from privlora.config.groups import (
    AT_CLIENTS,
    IN_MEMORY,
    OPTIMIZER_SETTINGS,
    AdapterSettings,
    DataSettings,
    MethodSettings,
    ModelSettings,
    PrivacySettings,
    RunSettings,
    Settings,
)
from privlora.config.peft_config import adapter_settings
from privlora.config.plain_yaml import UnboundedError, read_plain
from privlora.config.reading import checked, kept_settings, load_settings, read_yaml, settings_from
from privlora.config.synthesis import SynthesisSettings

__all__ = [
    "AT_CLIENTS",
    "IN_MEMORY",
    "OPTIMIZER_SETTINGS",
    "AdapterSettings",
    "AutoSettings",
    "ClientSettings",
    "DataSettings",
    "FederationSettings",
    "MethodSettings",
    "ModelSettings",
    "PrivacySettings",
    "RunSettings",
    "Settings",
    "SynthesisSettings",
    "UnboundedError",
    "adapter_settings",
    "checked",
    "kept_settings",
    "load_settings",
    "read_plain",
    "read_yaml",
    "settings_from",
]
