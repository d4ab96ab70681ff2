"""A federation in words: what card and page say of report["federation"]. Pure functions of the report."""

from __future__ import annotations

from math import frexp

from privlora.pages.numbers import number
from privlora.reporting.parties import Facts, against, hidden
from privlora.rounding import rounded_up

_NOISE_BY = {
    "client": "each client, for itself and in full",
    "shares": "all clients, each a share of what a sum needs",
    "server": "the server",
    None: "nobody",
}
# A card stays readable; the page and the JSON have all of them.
_MOST_NAMED = 8


def federation_table(report: Facts) -> list[tuple[str, str]]:
    """(name, value) rows of the section's facts."""
    facts = report["federation"]
    rounds, traffic = facts["rounds"], facts["bytes"]
    rows = [
        ("Rule", f"{facts['rule']['name']} (privlora federate --list-rules says what it is)"),
        ("Hidden", hidden(report["statement"])),
        ("Holds against", against(facts)),
        ("Noise is added by", _NOISE_BY[facts["noise_by"]]),
        ("Secure sums", _secure(facts)),
    ]
    if facts["lattice"] is not None:
        rows.append(("Distributed noise", _distributed(facts)))
    rows += [
        ("Clients", _clients(facts)),
        *_kinds(facts),
        ("Rounds", _rounds(rounds)),
        ("Drop-outs", _dropped(rounds)),
    ]
    noise = facts["update_noise"]
    if noise is not None:
        text = f"{number(noise['to_clip_norm'], 3)} times the clipping norm, which bounds the update itself"
        if noise["to_clip_norm"] >= 1:
            text += f"; about {noise['clients_needed']} clients in a round would make it as long"
        rows.append(("Noise on the mean update", text))
    if traffic["formula_down"] is not None:
        rows += [
            ("To a client in a round", _bytes(traffic["down"], traffic["formula_down"])),
            ("From a client in a round", _bytes(traffic["up"], traffic["formula_up"])),
        ]
    return rows


def card_paragraph(facts: Facts) -> str:
    """The federation in a few sentences; who released nothing comes first."""
    return (
        f"{who_trained(facts)} Records stayed with their clients. Rule {facts['rule']['name']}: "
        f"{_rounds(facts['rounds'])}, {_in_a_round(facts)} in each{_steps(facts)}. "
        f"Noise is added by {_NOISE_BY[facts['noise_by']]}. Secure sums: {_secure(facts)}."
    )


def who_trained(facts: Facts) -> str:
    """How many clients the adapter is of, and who released nothing."""
    silent, size = never_released(facts), len(facts["clients"])
    if not silent:
        return f"Trained by {size} clients together."
    more = f" and {len(silent) - _MOST_NAMED} more" if len(silent) > _MOST_NAMED else ""
    nothing = f"Nothing was released by {', '.join(silent[:_MOST_NAMED])}{more}."
    left = size - len(silent)
    if not left:
        return f"Trained by none of the {size} clients. {nothing}"
    return f"Trained by {left} of {size} clients. {nothing}"


def by_whom(facts: Facts) -> str:
    """The same in a few words, for a line of the page."""
    silent, size = len(never_released(facts)), len(facts["clients"])
    if silent:
        return f"by {size - silent or 'none'} of {size} clients"
    return f"together by {size} clients"


def _kinds(facts: Facts) -> list[tuple[str, str]]:
    if "phases" not in facts:
        return [("Local steps in a round", number(facts["local_steps"]))]
    return [
        (f"Rounds of phase {place}", f"{phase['rounds']}, each of {_of_a_phase(phase)}")
        for place, phase in enumerate(facts["phases"], start=1)
    ]


def _steps(facts: Facts) -> str:
    if "phases" not in facts:
        steps = facts["local_steps"]
        return f", with {steps} local step{'s' * (steps != 1)}"
    phases = [
        f"{phase['rounds']} round{'s' * (phase['rounds'] != 1)} of {_steps_and_batch(phase)}"
        for phase in facts["phases"]
    ]
    return f"; planned were {', then '.join(phases)}"


def _of_a_phase(phase: Facts) -> str:
    return f"{_steps_and_batch(phase)} of all clients together"


def _steps_and_batch(phase: Facts) -> str:
    steps = phase["local_steps"]
    return f"{steps} local step{'s' * (steps != 1)} with b {number(phase['expected_batch_size'])}"


def never_released(facts: Facts) -> list[str]:
    """Clients of which nothing is in the adapter: not charged, or, without ledgers, never heard."""
    return [
        client["name"]
        for client in facts["clients"]
        if client["steps_charged"] == 0
        or (client["steps_charged"] is None and client["rounds_answered"] == 0)
    ]


def clients_table(facts: Facts) -> list[tuple[str, ...]]:
    """A row of text for each client: name, epsilon spent, planned, delta, steps, rounds, weight."""
    return [
        (
            client["name"],
            rounded_up(client["epsilon"]),
            rounded_up(client["epsilon_planned"]),
            number(client["delta"]),
            _of(client["steps_charged"], client["steps_planned"]),
            _of(client["rounds_answered"], client["rounds_asked"]),
            number(client["weight"]),
        )
        for client in facts["clients"]
    ]


def noise_scope(facts: Facts | None) -> str:
    """Of what the section on weights shows the noise."""
    if facts is None or (facts["noise_by"] == "shares" and facts["rule"]["name"] == "joint"):
        return "one step"
    if facts["noise_by"] == "client":
        return "one step of one client, where the federation started and before clients are averaged,"
    return "one round, at the point where the federation started,"


def many_silent(facts: Facts) -> list[str]:
    """All clients that released nothing, where `who_trained` names a part of them."""
    silent = never_released(facts)
    return silent if len(silent) > _MOST_NAMED else []


def _secure(facts: Facts) -> str:
    if not facts["secure_sums"]:
        return "no: the server sees each client's message"
    return (
        f"yes: the server sees sums only, modulo 2^{facts['ring_bits']}, and none with fewer than "
        f"{facts['threshold']} clients"
    )


def _distributed(facts: Facts) -> str:
    width, std = facts["lattice"]["width"], facts["share_noise_std"]
    return (
        f"sums of {facts['lattice']['entries']} entries on multiples of 2^{frexp(width)[1] - 1} modulo "
        f"2^{facts['ring_bits']}, discrete Gaussian noise of {std / width:.6g} units from each client, "
        f"{facts['threshold']} honest ones at least; {number(std)} from each client, in units of the sum"
    )


def _rounds(rounds: Facts) -> str:
    void = f", {rounds['void']} void" if rounds["void"] else ""
    return f"{rounds['done']} of {rounds['planned']} planned rounds done{void}"


def _clients(facts: Facts) -> str:
    size = len(facts["clients"])
    if facts["noise_by"] == "server":
        rate = number(facts["clients_per_round"] / size)
        return f"{size}; the server draws each with probability {rate} in a round, and tells nobody whom"
    return f"{size}, of which {facts['clients_per_round']} train in a round"


def _in_a_round(facts: Facts) -> str:
    secret = facts["noise_by"] == "server"
    return f"{facts['clients_per_round']} clients{' in expectation, drawn in secret,' * secret}"


def _dropped(rounds: Facts) -> str:
    if not rounds["log"]:
        return "not told"
    count = sum(len(one["dropped"]) for one in rounds["log"])
    return (
        "none" if not count else f"{count} answers of clients that were asked did not come, or did not count"
    )


def _bytes(measured: float | None, numbers: float) -> str:
    formula = f"the rule's formula: {numbers:,.0f} numbers"
    # Of a trusted server nothing is told that depends on whom it drew.
    return formula if measured is None else f"{size(measured)} measured; {formula}"


def size(count: float) -> str:
    """Bytes for reading, in powers of ten.

    >>> size(387_856.0)
    '388 kB'
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def _of(part: int | None, whole: int | None) -> str:
    return "–" if part is None else f"{part} of {whole}"
