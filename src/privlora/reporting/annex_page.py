"""annex.html: two sheets of A4 in plain English, a pure function of annex.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from privlora.accounting.meaning import Meaning, in_words, share_in_words
from privlora.names import UNNAMED
from privlora.pages.template import fill
from privlora.reporting.annex import ATTACKS, SIGNATURE, SIGNED_BY
from privlora.reporting.signing import fingerprint_of
from privlora.reporting.wording import quoted


def render_annex(annex: Mapping[str, Any]) -> str:
    """The page: no script, no resource from elsewhere; every text of a user is escaped. Fields can be typed into."""
    means, signature, public = annex["means"], annex.get(SIGNATURE), dict[str, list[str]]()
    for each in annex["public"]:  # the ledgers of clients in one row
        public.setdefault(each["what"], []).append(each["file"])
    found = {name: means[name] for name in ("right_guesses", "found_at_1_percent", "found_at_1_permille")}
    return fill(
        "annex.html.j2",
        "privlora.reporting",
        title=f"Privacy annex · {annex['subject']['title']}",
        banner=None,
        annex=annex,
        meanings=in_words(Meaning(**found), annex["statement"]["unit"], None),
        public=public,
        percent=share_in_words,
        quoted=quoted,
        signature=None if signature is None else fingerprint_of(signature["public_key"]),
        ATTACKS=ATTACKS,
        SIGNED_BY=SIGNED_BY,
        UNNAMED=UNNAMED,
    )
