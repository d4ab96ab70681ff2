"""What settings ask of a row: refused as they are read, without the table, and of a start before a model is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from promises import promise

import privlora
from privlora.config import load_settings, settings_from
from privlora.errors import ConfigError
from privlora.methods import find_row
from privlora.training.assembly import plan_run
from privlora.training.misfits import refuse_misfits

PRIVACY = promise(steps=5, batch=4, records=100, delta=1e-5, target_epsilon=3)
PLAIN: dict[str, Any] = {"model": {"name": "tiny"}, "data": {"path": "r.jsonl"}, "privacy": PRIVACY}

UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "no noise": ({"name": "adamw"}, "method.name=adamw adds no noise"),
    "no unit": ({"name": "dp-zo", "relative_rate": True}, "method.relative_rate=true cannot be used"),
    "a clipping": ({"name": "pe-sgd", "clipping": "automatic"}, "cannot clip as clipping='automatic'"),
    "an optimizer": ({"name": "prism", "optimizer": "lamb"}, "has no optimizer "),
    "a setting": ({"weight_decay": 0.1}, "method 'prism' has no setting 'weight_decay' (line 4)"),
    "of the paper": ({"name": "prism-paper", "right_weight": 1.0}, "has no setting 'right_weight'"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_a_row_cannot_have_is_refused_where_settings_are_read(name: str, tmp_path: Path) -> None:
    method, words = UNFIT[name]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**PLAIN, "method": method}))
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_settings(path)
    path.write_text(
        yaml.safe_dump({**PLAIN, "method": {"name": "prism", "clipping": "automatic", "right_weight": 0.5}})
    )
    assert load_settings(path).method.clipping == "automatic"


SPLIT, SUBSPACE = {"init": "spectral-split"}, {"init": "w0-subspace"}
UNFIT_LATER: dict[str, tuple[dict[str, Any], str]] = {
    "a start of whole updates": ({"method": {"name": "projected"}, "adapter": SPLIT}, "draws new ones"),
    "a start at zero": ({"method": {"name": "prism-paper"}, "adapter": SUBSPACE}, "adapter of zeros"),
    "a start of subspaces": ({"method": {"name": "projected"}, "adapter": SUBSPACE}, "draws new ones"),
    "a start that is taken out": (
        {"method": {"name": "popri"}, "adapter": SPLIT, "synthesis": {}},
        "init=spectral-split does not go with method 'popri'",
    ),
    "a count": (
        {"method": {"name": "wishart-m2"}, "privacy": {**PRIVACY, "clip_quantile": 0.5}},
        "not projected",
    ),
    "no texts": ({"method": {"name": "pe-sgd"}}, "public texts, and none are given"),
    "texts of nobody": ({"synthesis": {}}, "uses no public texts"),
    "no noise": ({"method": {"name": "adamw"}}, "adds no noise"),
}


@pytest.mark.parametrize("name", UNFIT_LATER)
def test_what_settings_alone_tell_is_refused_before_a_model_is_looked_for(name: str) -> None:
    groups, words = UNFIT_LATER[name]
    with pytest.raises(ConfigError, match=words):
        plan_run(settings_from({**PLAIN, **groups}))  # there is no model called tiny


@pytest.mark.parametrize("function", ["fine_tune", "federate"])
def test_an_argument_is_given_once(function: str) -> None:
    call: Any = getattr(privlora, function)
    with pytest.raises(TypeError, match=f"{function}.. got multiple values for argument 'model'"):
        call("tiny", model="tiny")


def test_a_hopeless_rate_of_a_private_run_is_refused() -> None:
    """All of epsilon would be spent on noise."""

    def asked(rate: float, **privacy: Any) -> None:
        method = {"name": "prism" if "private" not in privacy else "adamw", "learning_rate": rate}
        given = settings_from({**PLAIN, "privacy": {**PRIVACY, **privacy}, "method": method})
        refuse_misfits(given, find_row(given.method.name))

    with pytest.raises(ConfigError, match=r"learning_rate=10000 is 4\.57e\+04 times the method's default"):
        asked(10000)
    asked(10)
    asked(10000, private=False, target_epsilon=None)
