"""``privlora plan`` of a federation: what each client will spend, without reading a private record."""

from __future__ import annotations

from math import prod, sqrt
from typing import Any

from privlora.accounting import Plan, accountant_versions, epsilon
from privlora.accounting.meaning import Meaning, in_words, meaning
from privlora.cli.console import accounting
from privlora.cli.memory import estimate_memory
from privlora.cli.planning import (
    local_model,
    memory_rows,
    noise_rows,
    opinion_rows,
    opinions,
    rate_rows,
    refused_here,
    statement_of,
)
from privlora.config import Settings
from privlora.config.federation import FederationSettings
from privlora.federated.plans import (
    client_plan,
    federation_of,
    resolved,
    rule_of,
    rule_settings,
    server_plan,
    with_local_method,
)
from privlora.federated.progress import in_bytes
from privlora.federated.words import InWords
from privlora.methods import far_rate, find_method
from privlora.reporting.limits import not_protected
from privlora.training.models import adapter_for


def plan_federation(settings: Settings, cross_check: bool) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """What follows from the settings and the model's configuration, and its lines on the screen, each with a name.

    cross_check: also ask other accountants.
    """
    settings, model, _ = local_model(settings)
    refused = refused_here(settings, model)
    with accounting(settings.privacy.steps):
        settings = with_local_method(settings)
        plan, own = client_plan(settings, model), server_plan(settings)
        federation, whole = federation_of(settings), own or plan
        cost = means = None
        if whole is not None and not whole.insecure_noise:
            cost = epsilon(whole.phases, whole.delta, adjacency=whole.adjacency)
            means = meaning(whole.phases, whole.adjacency).to_dict()
        said = InWords(settings, plan, own)
        known = said.colluding
    hyper, method = resolved(settings), find_method(settings.method.name)
    noisy = settings.privacy.private and federation.privacy_model == "record"  # as `plans.resolved` has it
    of_all = settings.changed(
        privacy={"steps": federation.steps, "private": noisy}
    )  # local steps of all rounds
    content = {
        "private": cost is not None,
        "clients": federation.names,
        "clients_per_round": federation.per_round,
        "rounds": federation.rounds,
        "drawn_in_secret": own is not None,
        "participations": federation.participations if own is None else None,
        "rule": federation.rule,
        "privacy_model": federation.privacy_model,
        "trusted_server": federation.trusted_server,
        "secure_sums": federation.secure,
        "threshold": federation.threshold if federation.secure else None,
        "method": settings.method.name,
        "hyperparameters": hyper.to_dict(),
        "rank": settings.adapter.r,
        "target_modules": settings.adapter.target_modules,
        "exclude_modules": settings.adapter.exclude_modules,
        "far_rate": far_rate(of_all),
        "default_rate": method.rate_of(federation.steps, private=noisy, relative=hyper.relative_rate),
        "local_steps": federation.local_steps,
        "sample_rate": settings.privacy.q,
        "expected_batch_size": settings.privacy.b,
        "expected_batch_size_of_a_client": settings.privacy.b / federation.size,
        **({} if whole is None else _noise(federation, whole)),
        "epsilon": cost,
        "means": means,
        "epsilon_against_another_client": known[0]["epsilon"] if known else cost,
        "colluding": known,
        "bytes": None if model is None else _bytes(settings, model),
        "memory": None if model is None else estimate_memory(settings, method, model),
        "refused_here": refused,
        "warnings": said.warnings(None if model is None else entries_of(settings, model)),
        "not_protected": [
            *not_protected(
                statement_of(whole, cost),
                hyper.init,
                discrete=federation.distributed,
                unchecked=settings.data.unchecked,
            ),
            *said.what_is_not_hidden(),
        ],
    }
    if cross_check and whole is not None and cost is not None:
        content |= opinions(whole)
    return content, _rows(said, content)


def entries_of(settings: Settings, model: Any) -> int:
    """Numbers of one client's answer. model: with or without weights."""
    federation = federation_of(settings)
    if federation.joint:
        return find_method(settings.method.name).coordinates.dimension_of(adapter_for(settings, model))
    rule = rule_of(federation)
    answered = rule.shapes(rule.stages[0], 1, _groups(settings, model), rule_settings(settings))[1]
    return sum(map(prod, answered.values()))


def _groups(settings: Settings, model: Any) -> list[tuple[int, int, int]]:
    """Adapted modules of one size: how many there are, and the size."""
    return [(len(group.sites), group.m, group.n) for group in adapter_for(settings, model).groups]


def _noise(federation: FederationSettings, plan: Plan) -> dict[str, Any]:
    """What is released, in all phases with the one noise multiplier, and the standard deviation in each coordinate."""
    event = plan.phases[-1][0]
    whole = event.noise_multiplier * plan.clip_norm / plan.expected_batch_size
    weights = sorted(federation.weights or [1.0] * federation.size, reverse=True)[: federation.per_round]
    share = sqrt(sum(weight**2 for weight in weights)) / sum(weights)
    alone = federation.privacy_model == "record" and not federation.joint
    return {
        "noise_of_a_client": whole if alone else None,
        "noise_of_the_mean": whole * share if alone else whole,
        "delta": plan.delta,
        "clip_norm": plan.clip_norm,
        "noise_multiplier": event.noise_multiplier,
        **({"sampling": event.to_dict()["sampling"]} if len(plan.phases) == 1 else {}),
        "releases": plan.steps,
        "adjacency": plan.adjacency,
        "unit": plan.unit,
        "accountant": "pld",
        "versions": accountant_versions(),
    }


def _bytes(settings: Settings, model: Any) -> dict[str, float]:
    """Of one client in a round (the second, where rounds differ), without what engine and secure sums add."""
    federation, groups = federation_of(settings), _groups(settings, model)
    if federation.joint:
        down = float(settings.adapter.r * sum(count * (m + n) for count, m, n in groups))
        up = float(entries_of(settings, model))
    else:
        down, up = rule_of(federation).message_sizes(
            groups, rule_settings(settings), number=2, clients=federation.per_round
        )
    # Lattice integers have 4 bytes as a rule, 8 where their sums would not fit; releases are summed in 8.
    width = 8 if federation.secure and not (federation.distributed and settings.privacy.private) else 4
    return {"down": 4 * down, "up": width * up}


def _rows(said: InWords, content: dict[str, Any]) -> list[tuple[str, str]]:
    hyper = ", ".join([content["method"], *(f"{k} {v}" for k, v in content["hyperparameters"].items())])
    whole, protected = said.own or said.plan, said.who_is_protected()
    rows = [("promise", protected)]
    if content["means"] is not None:
        rows = [
            ("promise", said.what_it_costs()),
            ("hidden", protected.removeprefix("hidden: ")),
            *(("means", words) for words in in_words(Meaning(**content["means"]), content["unit"], None)),
        ]
    if content["colluding"]:
        rows.append(("means", "A client that knows its own share of the noise is right more often."))
    rows += [
        ("clients", said.who_trains()),
        ("rule", said.how_it_is_put_together().removeprefix("rule ")),
        ("server", said.what_the_server_sees()),
        ("method", hyper),
        *rate_rows(content),
    ]
    unit = said.settings.privacy.unit
    average = f"on average {content['expected_batch_size']:g} {unit}s of all clients together"
    rows.append(("batches", f"Poisson, q {content['sample_rate']:.6g}: {average}"))
    if whole is not None:
        rows += [
            (
                "releases",
                f"{content['releases']} {'by the server' if said.own else 'of each client at most'}",
            ),
            ("statement", whole.describe()),
            *noise_rows(content, whole),
        ]
        noise = f"{content['noise_of_the_mean']:.4g} in each coordinate of the mean"
        if content["noise_of_a_client"] is not None:
            alone = f"{content['noise_of_a_client']:.4g} in each coordinate of a client's step"
            noise = f"{alone}, {noise} of {content['clients_per_round']} clients' steps"
        rows.append(("noise", noise))
    sizes = "unknown: the model is not a local folder"
    if content["bytes"] is not None:
        down, up = (in_bytes(content["bytes"][way]) for way in ("down", "up"))
        masks = ", about 4 kB more for secure sums" if content["secure_sums"] else ""
        sizes = f"about {down} to a client and {up} from it in a round{masks}"
    rows += [*opinion_rows(content), ("messages", sizes), *memory_rows(content["memory"])]
    return rows + [("WARNING", text) for text in content["warnings"]]
