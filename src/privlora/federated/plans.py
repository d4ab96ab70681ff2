"""What follows from a federation's settings: who trains when and with which local method, what each client will
release, and what distributed noise is worth, and to whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil, prod, sqrt
from typing import Any, Final

import torch

from privlora.accounting import Adjacency, Ledger, Plan, epsilon
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.config import (
    AT_CLIENTS,
    ClientSettings,
    FederationSettings,
    RunSettings,
    Settings,
)
from privlora.config.federation import colluding_counts, honest_left
from privlora.config.one_place import METRIC_AND_RULE
from privlora.data.sampling import PoissonSampler
from privlora.errors import ConfigError, PrivacyError
from privlora.federated.messages import SUM
from privlora.federated.rules import RULES, Rule, RuleSettings
from privlora.mechanisms import Lattice, lattice_for
from privlora.methods import METHODS, Hyperparameters, Method, find_method
from privlora.names import SPECTRAL_SPLIT, published_name
from privlora.pages.numbers import finite
from privlora.randomness import counter_generator
from privlora.training.promise import ADJACENCY, noise_multiplier, plan_privacy

_ONE = "one factor", "ffa"
_MOVED = {
    "both": ("both factors", "dp-adamw"),
    "left": _ONE,
    "right": _ONE,
    "tangent": ("tangent coordinates at a fixed base", "prism"),
}
"""What clients move, in words, and by which method unless told otherwise."""


def federation_of(settings: Settings) -> FederationSettings:
    """Raises ConfigError for settings of a run that is no federation."""
    if settings.federation is None:
        fix = "add it, or use `privlora train` for a run in one place"
        raise ConfigError("these settings have no group federation", fix=fix)
    return settings.federation


def names_alone(names: Sequence[str]) -> dict[str, Any]:
    """Of the group federation: clients by their names, and nothing of where their records lie or come from."""
    return {"clients": [ClientSettings(name=name) for name in names], "column": None, "alpha": None}


def rule_of(federation: FederationSettings) -> type[Rule]:
    """The class of the table; not for joint, which is training itself."""
    return RULES[federation.rule]


def rule_settings(settings: Settings) -> RuleSettings:
    """What the rule depends on; public."""
    federation = federation_of(settings)
    return RuleSettings(
        rank=settings.adapter.r,
        oversampling=federation.oversampling,
        warm=federation.warm_sketch,
        proximal=federation.proximal,
        private=settings.privacy.private and federation.privacy_model == "record",
        seed=settings.run.seed,
        participation=federation.per_round / federation.size,
    )


def rule_in(settings: Settings) -> dict[str, Any]:
    """What a report says of the rule. exact: whether the mean of the clients' updates is taken, before the cut to rank
    r. common: whether the adapter is a whole update."""
    federation = federation_of(settings)
    rule = None if federation.joint else rule_of(federation)
    return {
        "name": federation.rule,
        "exact": rule is None or rule.is_exact(rule_settings(settings), federation.per_round),
        "common": rule is None or rule.common,
    }


def with_local_method(settings: Settings) -> Settings:
    """The settings with a method that the rule's clients can train with: the one that was named, or the rule's own.

    Raises ConfigError for a rule or a privacy model that does not exist or does not go with the method.
    """
    federation = federation_of(settings)
    if federation.secure_aggregation is None and not settings.privacy.private:
        # Without noise there are no shares of it that only a sum would hide.
        settings = settings.changed(federation={"secure_aggregation": False, "survivors": None})
        federation = federation_of(settings)
    start = settings.adapter.init or find_method(settings.method.name).init
    if start == SPECTRAL_SPLIT:
        why = "what it takes out of the frozen weights is no part of what clients are sent"
        fix = "set adapter.init to w0-subspace or an adapter's folder, and method.name to another than prism-paper"
        raise ConfigError(f"adapter.init={start} does not go with a federation", why=why, fix=fix)
    if federation.joint:
        method = find_method(settings.method.name)
        if method.name not in joint_methods():
            what = f"federation.rule=joint cannot train by method.name={method.name}"
            why = "its clients would have to share a secret direction or projection, or send whole weight matrices"
            raise ConfigError(what, why=why, fix="use prism, or another method of low-rank factors")
        return settings
    rule = rule_of(federation)
    if rule.name == "scaffold" and settings.method.relative_rate:
        why = "its control variates are gradients: how far a client came at one rate for all modules"
        fix = "remove relative_rate and give a learning_rate in entries, or choose another rule"
        raise ConfigError("federation.rule=scaffold does not go with method.relative_rate", why=why, fix=fix)
    if settings.method.metric_power:  # changed after they were read, which refuses it too
        raise ConfigError(f"method.metric_power {METRIC_AND_RULE[0]}", fix=METRIC_AND_RULE[1])
    if settings.privacy.private and federation.privacy_model == "client" and not hides_clients(rule):
        what = f"federation.rule={rule.name} cannot hide whole clients (federation.privacy_model=client)"
        why = "the noise covers one sum of clipped updates a round, and this rule needs more than that"
        raise ConfigError(what, why=why, fix="fedavg, tan, alt, or another rule of one summed message")
    if federation.secure and not rule.linear:
        what = f"federation.rule={rule.name} cannot be summed securely (federation.secure_aggregation)"
        why = "its server needs each client's update, and would get their sum"
        fix = "leave secure_aggregation out, or choose a rule whose messages are summed (`privlora methods --rules`)"
        raise ConfigError(what, why=why, fix=fix)
    usual, fits = local_methods(rule, rule_settings(settings))
    if "name" not in settings.method.model_fields_set:
        return settings.changed(method={"name": usual.name})
    method = find_method(settings.method.name)
    if method.name not in fits:
        allowed = [name for name in fits if METHODS[name].private or not settings.privacy.private]
        raise ConfigError(
            f"federation.rule={rule.name} cannot train by method.name={method.name}",
            why=f"its clients move {_MOVED[rule.trains(1, rule_settings(settings))][0]}",
            fix=f"one of {', '.join(allowed)}, or no method.name",
        )
    return settings


def client_settings(settings: Settings) -> Settings:
    """The settings of a client's own steps: the sampling rate of all, its share of the batch as the divisor."""
    federation, privacy = federation_of(settings), settings.privacy
    if federation.joint:
        return settings
    share, rate = privacy.b / federation.size, privacy.q
    own = {"sample_rate": rate, "expected_batch_size": share, "public_dataset_size": None}
    return settings.changed(privacy=own)


def client_plan(settings: Settings, model: torch.nn.Module | None = None) -> Plan | None:
    """What one client will release at most; None in the non-private mode, or where a trusted server adds the noise."""
    federation = federation_of(settings)
    if not settings.privacy.private or federation.trusted_server:
        return None
    if federation.privacy_model == "record":
        phase = PoissonSampling(settings.privacy.q), federation.steps_of_a_client
        return plan_privacy(client_settings(settings), model, [phase])
    return _of_whole_clients(settings, PoissonSampling(1.0), federation.participations)


def public_settings(settings: Settings) -> Settings:
    """What clients are told: what training depends on, and nothing of the server's machine or of its own records."""
    # Clients go on from what they are sent, so only the settings that follow from the start are theirs.
    method = {**resolved(settings).to_dict(), "clipping": settings.method.clipping}
    method.pop("init", None)
    run = settings.run
    return settings.changed(
        model={"name": published_name(settings.model.name), "device": "auto"},
        adapter={"init": None, "public_text": None},
        data={"path": AT_CLIENTS, "evaluation": None},
        method=method,
        federation=names_alone(federation_of(settings).names),
        run=RunSettings(seed=run.seed, label=run.label, tokens_per_micro_batch=run.tokens_per_micro_batch),
    )


def resolved(settings: Settings) -> Hyperparameters:
    """Of the local method; steps are counted over all rounds."""
    federation, method = federation_of(settings), find_method(settings.method.name)
    private = settings.privacy.private and federation.privacy_model == "record"
    return method.resolve(settings.method, settings.adapter.init, federation.steps, private=private)


def weight_of(settings: Settings, client: str) -> float:
    """Of a client in every mean; public."""
    federation = federation_of(settings)
    return 1.0 if federation.weights is None else federation.weights[federation.names.index(client)]


def stages_of(federation: FederationSettings) -> tuple[str, ...]:
    """The stages of a round, in order."""
    return ("train",) if federation.joint else rule_of(federation).stages


def tensors_of(settings: Settings, kind: str, number: int) -> tuple[set[str], set[str]]:
    """Names of the tensors that a client is sent in a message of round ``number``, and that it answers; of one group.

    Only stages have any, and "leave" of a rule without a common adapter, which brings what the clients share.
    """
    federation = federation_of(settings)
    stage = "train" if kind == "leave" and not rule_in(settings)["common"] else kind
    if stage not in stages_of(federation):
        return set(), set()
    if federation.joint:
        parts = find_method(settings.method.name).coordinates.state_parts
        return {f"0.{name}" for name in parts}, {SUM}
    sent, answered = rule_of(federation).shapes(stage, number, [(1, 1, 1)], rule_settings(settings))
    answers = {SUM} if federation.secure else set(answered)
    return set(sent), answers if stage == kind else set()


def server_plan(settings: Settings) -> Plan | None:
    """What a trusted server will release, with clients that it draws in secret; None where clients add the noise."""
    federation = federation_of(settings)
    if not settings.privacy.private or not federation.trusted_server:
        return None
    sampling = PoissonSampling(federation.per_round / federation.size)
    return _of_whole_clients(settings, sampling, federation.rounds)


def _of_whole_clients(settings: Settings, sampling: PoissonSampling, rounds: int) -> Plan:
    """One release a round, of the sum of clients' clipped updates."""
    federation, privacy = federation_of(settings), settings.privacy
    assert privacy.delta is not None
    phases = ((sampling, rounds),)
    return Plan(
        phases=((StepEvent(sampling, noise_multiplier(privacy, phases)), rounds),),
        delta=privacy.delta,
        target_epsilon=privacy.target_epsilon,
        adjacency=ADJACENCY,
        unit="client",
        records_per_user=None,
        clip_norm=privacy.clip_norm,
        expected_batch_size=float(federation.per_round),
        method=f"{federation.rule} {settings.method.name}",
        dataset=settings.run.label or "unnamed",
        insecure_noise=privacy.insecure_noise_seed is not None,
    )


def joint_methods() -> list[str]:
    """What rule joint goes with: methods of low-rank factors."""

    def fits(method: Method) -> bool:
        space = method.coordinates
        return not (space.dense or method.public_texts or space.forward_only)

    return [name for name, method in METHODS.items() if fits(method)]


def hides_clients(rule: type[Rule]) -> bool:
    """Whether a rule goes with privacy_model=client: all that a client sends is one update, which can be clipped."""
    return len(rule.stages) == 1 and rule.linear and not rule.memory


def local_methods(rule: type[Rule], chosen: RuleSettings) -> tuple[Method, list[str]]:
    """What a rule's clients train with unless told otherwise, and the names of all that they can train with."""
    # SCAFFOLD's control variates are those of plain gradient steps.
    usual = METHODS["dp-sgd" if rule.name == "scaffold" else _MOVED[rule.trains(1, chosen)][1]]
    # FedASK trains one factor under privacy and both without it, so plain AdamW goes with it as well.
    return usual, [row.name for row in METHODS.values() if row.coordinates is usual.coordinates]


def charges_a_round(federation: FederationSettings) -> int:
    """How many releases a client's ledger is charged for in a round."""
    return 1 if federation.privacy_model == "client" else federation.local_steps


def refuse_spent(ledger: Ledger, takes: int) -> None:
    """Raise PrivacyError if the ledger has fewer releases left than a round takes."""
    left = ledger.plan.steps - ledger.charges
    if left < takes:
        what = f"the budget has {max(0, left)} releases left, and a round takes {takes}"
        why = "more releases than planned would exceed the stated epsilon"
        raise PrivacyError(what, why=why, fix="end the federation; the next one can plan more rounds")


@lru_cache(maxsize=4)
def timetable(names: tuple[str, ...], per_round: int, rounds: int, seed: int) -> list[list[str]]:
    """The clients of rounds 1, 2, … in the order of ``names``: those that trained least so far, ties by a public draw.
    By it a client knows when it may be asked, and together with whom.

    No client is drawn more often than ceil(rounds * per_round / len(names)) times, and any two differ by one at most.
    """
    taken, found = dict.fromkeys(names, 0), []
    for number in range(1, rounds + 1):
        draws = dict(zip(names, counter_generator(seed, stream=number).random(len(names)), strict=True))
        chosen = set(sorted(names, key=lambda name: (taken[name], draws[name]))[:per_round])
        for name in chosen:
            taken[name] += 1
        found.append([name for name in names if name in chosen])
    return found


def secret_participants(names: Sequence[str], sampler: PoissonSampler, rounds: int) -> Iterator[list[str]]:
    """PRIVATE. The clients of each round in the order of ``names``, perhaps none: each joins by a coin of its own.

    sampler: over the clients; what it states is what a trusted server's releases are charged with.
    """
    for _ in range(rounds):
        yield [names[place] for place in sorted(sampler.draw())]


ANY: Final[Mapping[str, tuple[int, ...]]] = {"sum": (1,)}
"""An answer for where the model is not at hand. What is left of the noise does not depend on its size: rounding is
calibrated away, and of the noise that covers it less than 1e-9 is."""


def lattice_of(
    federation: FederationSettings, plan: Plan | None, expected: Mapping[str, tuple[int, ...]] = ANY
) -> Lattice | None:
    """What the clients of a round round to where their noise is distributed, from public numbers; else None.

    plan: of each client's ledger. expected: names and shapes of one client's answer. Raises ConfigError where no
    lattice is fine enough.
    """
    if plan is None or not federation.distributed:
        return None
    return lattice_for(
        clip_norm=plan.clip_norm,
        noise_multiplier=plan.phases[-1][0].noise_multiplier,
        expected_batch_size=plan.expected_batch_size,
        entries=sum(prod(shape) for shape in expected.values()),
        clients=federation.per_round,
        survivors=federation.threshold,
    )


def colluding(
    federation: FederationSettings,
    lattice: Lattice | None,
    plan: Plan | None,
    events: Sequence[tuple[StepEvent, int]],
) -> list[dict[str, Any]]:
    """Epsilon of the same releases for c clients and a server that work together and take off their own noise, in the
    smallest sum that they can open, for the c of `colluding_counts`.

    events: what was, or will be, charged. Rows have ``clients``, ``noise_multiplier`` (what is
    left: sigma sqrt(`honest_left` / t)) and ``epsilon``; none where nobody knows a share, or nothing is promised.
    """
    if lattice is None or plan is None or plan.insecure_noise:
        return []
    rows, n, t = [], federation.per_round, federation.threshold
    for count in colluding_counts(n, t):
        honest = honest_left(n, t, count)
        left = replace(lattice, survivors=honest).noise_multiplier(plan.clip_norm)
        weaker = tuple((replace(event, noise_multiplier=left), number) for event, number in events)
        found = epsilon_of(weaker, plan.delta, plan.adjacency)
        rows.append({"clients": count, "noise_multiplier": left, "epsilon": finite(found)})
    return rows


@lru_cache(maxsize=64)
def epsilon_of(events: tuple[tuple[StepEvent, int], ...], delta: float, adjacency: Adjacency) -> float:
    """It takes seconds, and a plan is asked for it several times."""
    return epsilon(events, delta, adjacency=adjacency)


def update_noise(federation: FederationSettings, plan: Plan | None, entries: int) -> dict[str, float] | None:
    """Of the noise on the mean of whole clients' updates; None where clients are not the unit. to_clip_norm: its length
    over C, the longest that the mean itself can be. clients_needed: in a round, for a ratio of 1 at the same sigma.

    plan: of each client's ledger, or of a trusted server's. entries: d, of one client's update. Where t < K clients'
    noise is counted on, a sum of all K has sqrt(K / t) times sigma.
    """
    if plan is None or federation.privacy_model != "client":
        return None
    shares = 1.0 if federation.trusted_server else federation.per_round / federation.threshold
    length = plan.phases[-1][0].noise_multiplier * sqrt(entries * shares)
    return {"to_clip_norm": length / federation.per_round, "clients_needed": ceil(length)}
