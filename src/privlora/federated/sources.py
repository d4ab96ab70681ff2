"""Whose records are whose in a federation of one process: cut from one source, or each client's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from privlora.config import IN_MEMORY, ClientSettings, Settings
from privlora.data.partition import cut
from privlora.data.records import as_records, load_records
from privlora.errors import ConfigError, DataError, RunError, nearest
from privlora.federated.plans import federation_of
from privlora.training.inputs import check_sources

Records = Sequence[Mapping[str, Any]]


def refuse_missing_sources(
    settings: Settings, records: Records | Mapping[str, Records] | None, evaluation: Records | None
) -> None:
    """Refuse records that are not there, before a model is loaded. Raises ConfigError, DataError or RunError.

    records, evaluation: in memory, as for `records_of`.
    """
    clients, data = federation_of(settings).clients, settings.data
    lost = [data.path == IN_MEMORY and records is None, data.evaluation == IN_MEMORY and evaluation is None]
    if any(lost):
        which = "evaluation" if not lost[0] else "records"
        raise RunError(
            f"this federation's {which} were in memory",
            fix=f"go on in Python: privlora.resume_federation(root, {which}=...)",
        )
    cut_up = isinstance(clients, int)
    if cut_up and isinstance(records, Mapping):
        raise ConfigError(
            "records of each client, and a number of clients to cut records into",
            fix="give a list of clients with these names, or one list of records",
        )
    if not cut_up:
        _by_client(settings, records)
    check_sources(settings, records, evaluation)


def records_of(settings: Settings, records: Records | Mapping[str, Records] | None) -> dict[str, Records]:
    """Each client's records, by name. records: in memory; of all clients together, or by name. Raises ConfigError."""
    federation, data = federation_of(settings), settings.data
    if isinstance(federation.clients, int):
        if records is None:
            records = load_records(data.path, format=data.format, limit=data.limit)
        user = settings.privacy.user_column
        return dict(cut(as_records(records), federation, seed=settings.run.seed, user_column=user))
    found = _by_client(settings, records)
    return {client.name: _of_one(client, found) for client in federation.clients}


def _of_one(client: ClientSettings, found: Mapping[str, Records]) -> Records:
    """Raises DataError that names the client."""
    try:
        if client.name in found:
            return as_records(found[client.name])
        assert client.path is not None
        return load_records(client.path, format=client.format)
    except DataError as error:
        raise error.of(f"client {client.name}") from None


def _by_client(settings: Settings, records: Records | Mapping[str, Records] | None) -> dict[str, Records]:
    """Records in memory by client. Raises ConfigError for names of nobody, and for clients without records."""
    clients = federation_of(settings).clients
    assert not isinstance(clients, int)
    if records is not None and not isinstance(records, Mapping):
        raise ConfigError(
            "one list of records, and clients that have records of their own",
            fix="give a mapping from each client's name to its records, or a number of clients",
        )
    given: dict[str, Records] = dict(records or {})
    names = [client.name for client in clients]
    for name in given:
        if name not in names:
            raise ConfigError("records of a client that is not of the federation", fix=nearest(name, names))
    missing = [client.name for client in clients if client.path is None and client.name not in given]
    if missing:
        raise ConfigError(
            f"clients without a path: {', '.join(missing)}",
            why="in this process each client's records have to be found",
            fix="give each a path; clients on machines of their own: docs/federated-deployment.md",
        )
    return given
