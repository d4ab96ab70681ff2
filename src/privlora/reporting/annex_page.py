"""annex.html: two sheets of A4 in plain English, a pure function of annex.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from privlora.accounting.meaning import Meaning, in_words
from privlora.names import UNNAMED
from privlora.pages.numbers import number
from privlora.pages.template import fill
from privlora.reporting.annex import SIGNATURE, TO_FILL
from privlora.reporting.signing import fingerprint_of
from privlora.reporting.wording import quoted
from privlora.rounding import rounded_up

_BEFORE, _ATTACKS, _LAST = TO_FILL[:4], TO_FILL[4], TO_FILL[5]
_NO_ATTACKS: Final = (
    "None is recorded in this release. What audits find are facts about private records, so it stays where these are; "
    "whoever has it can enter it here. The bounds above hold for every attack by those against whom the statement "
    "holds, tried or not."
)
Annex = Mapping[str, Any]


def render_annex(annex: Annex) -> str:
    """The page: no script, no resource from elsewhere; every text of a user is escaped. Fields can be typed into."""
    subject = annex["subject"]
    return fill(
        "annex.html.j2",
        "privlora.reporting",
        title=f"Privacy annex · {subject['title']}",
        banner=None,
        annex=annex,
        figures=_figures(annex),
        trained=_trained(annex),
        protected=_protected(annex),
        means=_means(annex),
        to_fill=_BEFORE,
        attacks=_NO_ATTACKS,
        attacks_field=_ATTACKS,
        last=_LAST,
        files=_grouped(annex["public"]),
        signature=_signature(annex),
    )


def percent(value: float) -> str:
    """An upper bound on a share, never rounded down.

    >>> percent(0.95257), percent(0.5), percent(0.99996)
    ('95.3 %', '50.0 %', '100.0 %')
    """
    return f"{min(100.0, math.ceil(1000 * value - 1e-9) / 10):.1f} %"


def _figures(annex: Annex) -> list[tuple[str, str, str]]:
    """(value, name, detail) of the numbers that are read first."""
    s, means = annex["statement"], annex["means"]
    known = s["epsilon_against_another_client"]
    figures = [
        (rounded_up(s["epsilon"]), "ε", f"at δ = {number(s['delta'])}, at most"),
        (
            f"50 % → {percent(means['posterior_at_most'])}",
            "prior → posterior",
            f"that one {s['unit']} took part, at most: by the outcome that tells most",
        ),
        (
            percent(means["found_at_1_percent"]),
            "true positives at 1 % false ones",
            "by any attack, at most",
        ),
    ]
    if known is not None:
        posterior = percent(means["posterior_of_another_client_at_most"])
        detail = f"from 50 % to {posterior} at most: it knows its own share of the noise"
        figures.insert(1, (rounded_up(known), "ε against another client", detail))
    return figures


def _trained(annex: Annex) -> list[tuple[str, str]]:
    s, size, ledger = annex["subject"], annex["size"], annex["ledger"]
    base = quoted(s["base_model"]) + (f" at {quoted(s['base_revision'])}" if s["base_revision"] else "")
    if s["base_is_local"] or s["base_model"] == UNNAMED:
        base += " (a local folder)" if s["base_is_local"] else " (it was handed over)"
    rows = [
        ("Release", s["title"]),
        ("Base model", base),
        ("Learned", f"{s['task']}, by the method {s['method']}"),
    ]
    if s["clients"] is not None:
        rows.append(
            (
                "Trained by",
                f"{s['clients']} clients together, by the rule {s['rule']}; records stayed with them",
            )
        )
    return [
        *rows,
        ("Records", f"{quoted(s['dataset'])}; {_size(size)}"),
        ("Privacy mechanism", f"{s['mechanism']}; noise from {annex['statement']['noise']}"),
        ("Run", f"{ledger['run_id']}, begun on {ledger['created']}"),
    ]


def _size(size: Mapping[str, Any]) -> str:
    if size["of"] == "the federation":
        return f"{size['units']} clients, which are public"
    whose = f" in {size['of']}" if size["of"] != "all data" else ""
    return f"about {size['units']} {size['unit']}s{whose}, as the run was told (the true number is not published)"


def _protected(annex: Annex) -> list[tuple[str, str]]:
    s, protected = annex["statement"], annex["protected"]
    epsilon, delta = rounded_up(s["epsilon"]), number(s["delta"])
    replaced = s["epsilon_replace_one"]
    return [
        ("Who is protected", protected["who"]),
        ("Against whom", protected["against"]),
        ("What is hidden", f"the difference that {protected['adjacency']} makes (adjacency)"),
        (
            "Guarantee (ε, δ)",
            f"({epsilon}, {delta}), an upper bound by the {s['accountant'].upper()} accountant, for all "
            f"{annex['ledger']['steps_charged']} releases together",
        ),
        (
            f"If one {s['unit']} is replaced",
            "no bound is known" if replaced is None else f"ε = {rounded_up(replaced)}",
        ),
    ]


def _means(annex: Annex) -> list[str]:
    s, means = annex["statement"], annex["means"]
    reached = percent(means["posterior_at_most"])
    from_even_odds = (
        f"Somebody holds it for 50 % likely that one {s['unit']} took part, and studies all that is released. It is as "
        f"if the truth were told with probability δ = {number(s['delta'])}; in all other cases no certainty rises "
        f"above {reached}, whatever the outcome. What follows is of all outcomes together."
    )
    found = {name: means[name] for name in ("right_guesses", "found_at_1_percent", "found_at_1_permille")}
    sentences = [from_even_odds, *in_words(Meaning(**found), s["unit"])]
    if s["epsilon_against_another_client"] is not None:
        known = percent(means["posterior_of_another_client_at_most"])
        sentences.append(
            f"None of this is about another client, which knows its own share of the noise: its certainty can rise to "
            f"{known} in the place of {reached}."
        )
    return [text.replace(" %", "\N{NO-BREAK SPACE}%") for text in sentences]


def _grouped(public: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """(names, what): the ledgers of clients in one row."""
    rows: dict[str, list[str]] = {}
    for each in public:
        rows.setdefault(each["what"], []).append(each["file"])
    return [(_in_short(names), what) for what, names in rows.items()]


def _in_short(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _signature(annex: Annex) -> str | None:
    found = annex.get(SIGNATURE)
    return None if found is None else fingerprint_of(found["public_key"])
