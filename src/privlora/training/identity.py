"""Which private records and which model a run belongs to, kept in its private folder as hashes, and the settings and
the choice that it began with.

A resume with others would train on, evaluate or report what the run's statement does not speak of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import transformers

from privlora.adapters.quantised import bits, computes_in, scales
from privlora.config import Settings
from privlora.errors import PrivacyError, RunError, named
from privlora.training.base_weights import remember_weights
from privlora.training.checkpoint import digest_of, read_identity
from privlora.training.files import RunFolder, write_atomically
from privlora.training.inputs import Data
from privlora.training.ranks import Ranks
from privlora.version import __version__

_VALUES = 64  # of each parameter
_PIECE, _PLACES = 2**22, 65_521  # entries at once; a prime, so that blocks that change places show


@dataclass(frozen=True)
class Identity:
    """records: SHA-256 of the tokenised private records and their units; private; empty where none are at hand. model:
    of the base model. clients: as records, of each client of a federation by itself, to say whose are others; runs in
    one place have none. evaluation: SHA-256 of the tokenised public records, whose loss is published. settings: those
    that are fixed when a run begins, by ``fixed``. choice: ``proof_of`` what was found before it began, or empty.
    """

    records: str
    model: str
    clients: Mapping[str, str] = field(default_factory=dict)
    evaluation: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    choice: str = ""


def identify(data: Data | None, model: torch.nn.Module, sizes: Mapping[str, int] | None = None) -> Identity:
    """Of a run's data (None: its records are elsewhere) and of its base model without an adapter.

    sizes: how many of the records are of each client of a federation, in their order.
    """
    if data is None:
        return Identity("", _of_model(model))
    clients, first = {}, 0
    for name, size in (sizes or {}).items():
        digests = sorted(data.examples[i].digest for i in range(first, first + size))
        clients[name], first = sha256(b"".join(digests)).hexdigest(), first + size
    public = sha256(b"".join(sorted(each.digest for each in data.evaluation))).hexdigest()
    return Identity(data.proof, _of_model(model), clients, public)


_MOVABLE: Final[Mapping[str, frozenset[str]]] = {
    # Where things lie; of records and evaluation the content is held against the run's by itself.
    "data": frozenset(("path", "evaluation", "format")),
    "synthesis": frozenset(("file", "source", "callable", "endpoint")),
    "federation": frozenset(("clients",)),
}
_FIXED_ALONE: Final[Mapping[str, frozenset[str]]] = {
    "model": frozenset(("dropout", "revision")),
    "run": frozenset(("seed", "label")),
}
_OF_ROWS: Final = ("method.", "adapter.init")
_FIXED: Final = ("model", "data", "privacy", "adapter", "method", "run", "federation", "synthesis")


def fixed(settings: Settings, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """What decides what a run releases and what its report says of all of its steps: place -> value, JSON-ready.

    hyper: the method's settings with nothing left open, so that another version's defaults show. Where files lie, and
    what only takes time or memory, may change.
    """
    groups = settings.model_dump(mode="json")
    found = {}
    for group in _FIXED:
        for name, value in (groups[group] or {}).items():
            alone = _FIXED_ALONE.get(group)
            if name not in _MOVABLE.get(group, ()) and (alone is None or name in alone):
                found[f"{group}.{name}"] = value
    if settings.synthesis is not None:
        found["synthesis.generator"] = settings.synthesis.generator
    for name, value in hyper.items():
        found[f"adapter.{name}" if name == "init" else f"method.{name}"] = value
    whole: dict[str, Any] = json.loads(json.dumps(found))
    return whole


def refuse_other_settings(folder: RunFolder, settings: Mapping[str, Any]) -> None:
    """Raise PrivacyError, or RunError where no promise is at stake, for settings that were edited. settings: ``fixed``,
    or as much of it as is known."""
    kept = _kept(folder).settings
    others = {p: value for p, value in kept.items() if p in settings and settings[p] != value}
    if not others:
        return
    if "method.name" in others:  # from which the rest of them follows
        others = {p: v for p, v in others.items() if p == "method.name" or not p.startswith(_OF_ROWS)}
    others = dict(sorted(others.items(), key=lambda item: item[0] != "method.relative_rate"))
    told, mend = list[str](), list[str]()
    for place, value in others.items():
        was, now = _shown(value), _shown(settings[place])
        told.append(f"{place} is {_LONG}" if was == now else f"{place} was {was} and is {now}")
        mend.append(place if was == _LONG else f"{place}: {was}")
    private = any(place.startswith(("privacy.", "data.")) for place in others)
    raise (PrivacyError if private else RunError)(
        f"settings that were planned when the run began are other ones now: {'; '.join(told)}",
        why="its ledger and its report speak of one set of settings, for all of its steps",
        fix=[
            f"write {', '.join(mend)} as it was, in {folder.settings}",
            "or begin another run with the new ones, in another run.output, at a cost of its own",
        ],
    )


_LONG: Final = "another text or list"


def _shown(value: Any) -> str:
    """As YAML has it, if it is short."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value) if named(value) == repr(value) else _LONG


def keep_identity(folder: RunFolder, identity: Identity) -> None:
    """Write it into private/. Raises RunError."""
    write_atomically(folder.identity, json.dumps(asdict(identity)) + "\n")


def proof_of(choice: str) -> str:
    """SHA-256 of a file's text."""
    return sha256(choice.encode()).hexdigest()


def refuse_another_choice(folder: RunFolder, choice: str) -> None:
    """Raise RunError for a text that is not the one that the run kept when it began."""
    if _kept(folder).choice != proof_of(choice):
        raise RunError(
            f"{str(folder.choice)!r} is not what the run wrote when it began",
            why="the report repeats it as the reason for the run's settings",
            fix="restore it, or remove it: the report then does not say",
        )


def refuse_others(folder: RunFolder, identity: Identity) -> None:
    """Raise PrivacyError for other records than the run's, RunError for another model."""
    kept = _kept(folder)
    if kept.records != identity.records:
        raise PrivacyError(
            f"the private records{_whose(kept, identity)} are not those that the run began with",
            why="its statement speaks of one set of records, and what was private then could be published now",
            fix="resume with the same records, units and tokenizer, or start a new run",
        )
    if kept.clients != identity.clients:
        raise PrivacyError(
            "the private records are divided among clients otherwise than when the run began",
            why="a record that moves takes part in the rounds of two clients, and each ledger counts those of one",
            fix="give each client its own records again; a list that is cut into clients, in its first order",
        )
    if kept.evaluation != identity.evaluation:
        raise PrivacyError(
            "the evaluation records are not those that the run began with",
            why="their losses are published, and the report speaks of one set of public records",
            fix="resume with the same ones",
        )
    _refuse_model(kept, identity.model)


def refuse_another_model(folder: RunFolder, model: torch.nn.Module) -> None:
    """Raise RunError for another base model than that of the run in ``folder``."""
    _refuse_model(_kept(folder), _of_model(model))


def refuse_unlike_processes(model: torch.nn.Module, ranks: Ranks) -> None:
    """Raise PrivacyError unless all processes have the same base model, in one dtype, on devices of one kind.

    Else a unit's gradient would depend on which process it is dealt to, and so on who else was drawn.
    """
    if ranks.size == 1:
        return
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability()
    why = "a record's gradient would depend on the process that takes it, and so on the other records of the batch"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, privlora {__version__}"
    for what, value, fix in (
        ("the base model", _all_of_model(model), "give all processes the same files, loaded in the same way"),
        ("the device", f"{device.type} {kind}", "run on machines of one kind"),
        ("the number of threads", torch.get_num_threads(), "set OMP_NUM_THREADS to one number"),
        ("the version", versions, "install the same in all places"),
    ):
        ranks.refuse_unlike(what, value, why=why, fix=fix)


def _refuse_model(kept: Identity, model: str) -> None:
    if kept.model != model:
        raise RunError(
            "the base model is not the one that the run began with",
            why="its adapter and its losses would belong to neither",
            fix="resume with the same model in the same dtype, or start a new run",
        )


def _kept(folder: RunFolder) -> Identity:
    """What the run's private folder says. Raises RunError if it is gone or damaged."""
    try:
        found = Identity(**json.loads(folder.identity.read_text(encoding="utf-8")))
        if not (isinstance(found.settings, dict) and found.settings and isinstance(found.clients, dict)):
            raise ValueError
    except (OSError, ValueError, TypeError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise RunError(
            f"{str(folder.identity)!r} is {'missing' if missing else f'damaged ({type(error).__name__})'}",
            why="it says which records, model and settings the run belongs to, and what was charged is of no others",
            fix=_without_it(folder),
        ) from None
    known = read_identity(folder.checkpoint) if folder.checkpoint.exists() else None
    if known is not None and known != digest_of(folder.identity):
        raise PrivacyError(
            f"{str(folder.identity)!r} is not the one with which the run's checkpoint was taken",
            why="it says which records, model and settings what was charged is of",
            fix=_without_it(folder),
        )
    return found


def _without_it(folder: RunFolder) -> list[str]:
    """What can be done about an identity that is not the run's."""
    ways = [
        "restore it from a backup of the run's folder: nothing else can make it again",
        "without one this run cannot go on: begin another, in another run.output, at a cost of its own",
    ]
    if folder.ledger.exists():
        ways.append(
            f"what this run has spent stays spent: `privlora budget` adds ledgers up, so keep {folder.ledger}"
        )
    if folder.report.exists():
        ways.append(f"what it released already stays valid as it is: `privlora verify {folder.release}`")
    return ways


def _whose(kept: Identity, found: Identity) -> str:
    """The clients whose records are others, where it is not all of them."""
    others = [name for name, digest in found.clients.items() if kept.clients.get(name) != digest]
    some = kept.clients and 0 < len(others) < len(found.clients)
    return f" of client {', '.join(others)}" if some else ""


def _all_of_model(model: torch.nn.Module) -> str:
    """Of its kind, its configuration and each bit of its parameters and buffers."""
    if model in _REMEMBERED:
        return _REMEMBERED[model][1]
    config: Any = getattr(model, "config", None)
    kind = {} if config is None else config.to_dict()
    kind["attention"] = getattr(config, "_attn_implementation", None)
    kind.pop("_name_or_path", None)  # each machine has its own
    found = sha256(f"{type(model).__name__} {json.dumps(kind, sort_keys=True, default=str)}".encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        data = tensor.detach().reshape(-1).view(torch.uint8)
        data = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
        # Sums that no order of adding changes, of values and of values by place.
        sums = [0, 0]
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE].long()
            places = torch.arange(start, start + len(piece), device=piece.device) % _PLACES + 1
            sums = [sums[0] + int(piece.sum()), sums[1] + int((piece * places).sum())]
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {sums} ".encode())
    return found.hexdigest()


# Of models whose weights no longer lie here as a whole.
_REMEMBERED: Final = WeakKeyDictionary[torch.nn.Module, tuple[str, str]]()


def remember(model: torch.nn.Module) -> None:
    """Call it before the weights are spread over processes, where their first values lie."""
    _REMEMBERED[model] = _of_model(model), _all_of_model(model)
    remember_weights(model)


def _of_model(model: torch.nn.Module) -> str:
    """Of each parameter its name, shape, dtype and first values: what tells models apart without reading them whole."""
    if model in _REMEMBERED:
        return _REMEMBERED[model][0]
    found = sha256()
    # A packed layer's first pass casts its bias to what it computes in.
    packed = [module for module in model.modules() if bits(module) is not None]
    cast = {id(getattr(module, "bias", None)) for module in packed}
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()[:_VALUES].cpu().contiguous()
        dtype = parameter.dtype
        if id(parameter) in cast:
            values, dtype = values.float(), torch.float32
        found.update(f"{name} {tuple(parameter.shape)} {dtype} ".encode())
        found.update(values.view(torch.uint8).numpy().tobytes())
    for name, module in model.named_modules():
        if bits(module) is not None:  # what packed values are taken for
            threshold = getattr(getattr(module, "state", None), "threshold", None)
            found.update(f"{name} {bits(module)} bits {computes_in(module)} {threshold} ".encode())
            found.update(scales(module)[:_VALUES].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
