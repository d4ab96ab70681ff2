"""Settings that do not go with a row of the table, or with each other: told before a model is read.

Nothing here imports transformers, so that a plan says what it can at once.
"""

from __future__ import annotations

from privlora.config import Settings
from privlora.config.methods import adds_no_noise, no_setting
from privlora.config.synthesis import OF_POPRI
from privlora.errors import ConfigError
from privlora.mechanisms import UNADAPTED
from privlora.methods import SPACES, Method, find_row, refuse_hopeless_rate
from privlora.names import PUBLIC_GRADIENT, RANDOM, SPECTRAL_SPLIT, W0_SUBSPACE
from privlora.optimizers.paper import no_start_at_zero


def refuse_misfits(settings: Settings, method: Method) -> None:
    """Raise ConfigError for settings that do not go with a method, as far as no model is needed to tell."""
    privacy, kind = settings.privacy, method.coordinates
    if privacy.private and not method.private:
        raise adds_no_noise(method.name)
    refuse_clashes(settings, method)
    hyper = method.resolve(settings.method, settings.adapter.init, privacy.steps)
    clipping, quantile = settings.method.clipping or method.clipping, privacy.clip_quantile is not None
    odd, dropped = kind.dense or kind.forward_only, settings.adapter.lora_dropout
    split = method.tunes_writer and hyper.init == SPECTRAL_SPLIT
    packed, passes = settings.model.quantization is not None, privacy.sampling != "poisson"
    for wrong, setting, why in (
        (kind.dense and packed, "model.quantization", "it adds a dense update to packed weights"),
        (dropped and (odd or method.public_texts), "adapter.lora_dropout", "it would compare unlike masks"),
        (odd and privacy.bands != 1, f"privacy.bands={privacy.bands}", "no step could take noise back"),
        (kind.dense and passes, f"privacy.sampling={privacy.sampling}", "its bound is of Poisson sampling"),
        (quantile and method.charges_projections, "privacy.clip_quantile", "the count is not projected"),
        (split, f"adapter.init={hyper.init}", "it tunes the model with all of its weights"),
    ):
        if wrong:
            raise _clash(setting, method, why)
    if settings.method.metric_power and privacy.bands != 1:
        raise ConfigError(
            f"privacy.bands={privacy.bands} does not go with method.metric_power={settings.method.metric_power:g}",
            fix=["remove metric_power", "or remove bands, which bring little in large batches"],
        )
    if quantile and clipping in UNADAPTED:
        raise ConfigError(
            f"privacy.clip_quantile does nothing beside {clipping} clipping, which scales gradients to one norm",
            fix="remove clip_quantile, or set method.clipping=flat",
        )
    refuse_hopeless_rate(settings)
    rule = SPACES[method.space].optimizers[hyper.optimizer]
    if not rule.leaves_zero and hyper.init in (RANDOM, W0_SUBSPACE, PUBLIC_GRADIENT):
        raise no_start_at_zero()
    if quantile and hyper.settings.get("hold_out"):
        what = f"privacy.clip_quantile does not go with method.hold_out={hyper.settings['hold_out']:g}"
        raise ConfigError(what, fix="remove clip_quantile, or set method.hold_out=0")


def _clash(setting: str, method: Method, why: str) -> ConfigError:
    return ConfigError(
        f"{setting} does not go with method {method.name!r}",
        why=why,
        fix="remove the setting, or choose another method, such as prism or dp-adamw",
    )


def refuse_clashes(settings: Settings, method: Method) -> None:
    """Raise ConfigError, also without privacy, for what does not go with labels and preferences, with losses that are
    compared instead of gradients, and with votes."""
    _refuse_on_answers(settings, method)
    chosen = settings.synthesis
    if method.coordinates.forward_only and settings.model.dropout:
        raise _clash("model.dropout", method, "both losses would be those of other masks")
    if method.coordinates.forward_only and chosen is not None and chosen.warm_start_epochs:
        why = "one direction a step learns next to nothing of public texts; adapter.init may name an adapter that did"
        raise _clash("synthesis.warm_start_epochs", method, why)
    if method.releases == "votes":
        _refuse_on_votes(settings, method)


def _refuse_on_answers(settings: Settings, method: Method) -> None:
    labels, chosen = settings.data.label is not None, settings.data.chosen is not None
    space = method.coordinates
    unfit = {
        f"method {method.name!r}": method.releases == "votes"
        or method.public_texts
        or space.dense
        or (labels and space.forward_only),
        "the group synthesis": labels and settings.synthesis is not None,
        "adapter.public_text": settings.adapter.public_text is not None,
        # The reference would be another one at every step.
        "model.dropout": chosen and settings.model.dropout,
        "model.fully_shard": settings.model.fully_shard,
    }
    for what in (what for what, is_unfit in unfit.items() if is_unfit and (labels or chosen)):
        raise ConfigError(
            f"{what} does not go with data.{'label' if labels else 'chosen'}",
            fix="choose prism, dp-adamw or another method that takes gradients of two factors, or remove the setting",
        )


def _refuse_on_votes(settings: Settings, method: Method) -> None:
    """Raise ConfigError for settings of gradients, which would be ignored."""
    privacy, called = settings.privacy, method.called
    if not privacy.private:
        raise ConfigError(
            f"method.name={method.name} releases sums of {called}, and exact ones are never made",
            why="they would show single records",
            fix="remove privacy.private=false and give a target, or choose adamw",
        )
    given = {
        "privacy.clip_norm": privacy.clip_norm != 1.0,
        "privacy.clip_quantile": privacy.clip_quantile is not None,
        "privacy.bands": privacy.bands != 1,
        "privacy.sampling": privacy.sampling != "poisson",
        "privacy.max_batch_size": privacy.max_batch_size is not None,
        "method.clipping": settings.method.clipping is not None,
    }
    for name in (name for name, is_given in given.items() if is_given):
        what = f"{name} does not go with method {method.name!r}, which releases {called} of norm 1"
        raise ConfigError(what, fix=f"remove {name}, which would have no effect")


def refuse_missing_texts(method: Method) -> None:
    """Raise ConfigError for a row that leans on public texts: there are none."""
    if method.public_texts:
        way = f"{method.called} on" if method.releases == "votes" else "along the gradients of"
        raise ConfigError(
            f"method {method.name!r} releases {way} public texts, and none are given",
            fix="add the group synthesis, as `synthesis: {preset: text}`; or choose another method, such as prism",
        )


def refuse_unused_texts(settings: Settings) -> None:
    """Raise ConfigError if the group ``synthesis`` describes texts that nothing would read, cannot write those that are
    to be released, or has fewer than method.top_k."""
    chosen, method = settings.synthesis, find_row(settings.method.name)
    if chosen is None:
        return
    name, top_k, writer = method.name, settings.method.top_k or 0, f"synthesis.{chosen.generator}"
    another, tunes = chosen.generator != "model", method.tunes_writer
    for other in () if tunes else sorted(chosen.given & set(OF_POPRI)):
        raise ConfigError(
            f"synthesis.{other} is read by method popri and not by {name}",
            fix="remove it, or set method.name=popri",
        )
    for wrong, what, fix in (
        (
            method.releases == "votes" and chosen.evolution == "none",
            f"method {name!r} is rounds of texts, and synthesis.evolution=none keeps the first",
            "set variations or fresh",
        ),
        (
            not chosen.epochs and not tunes,
            f"synthesis.epochs=0 trains no adapter of method {name!r}",
            "set at least 1",
        ),
        (
            tunes and another,
            f"method {name!r} tunes the model that writes, and {writer} asks another writer",
            f"remove {writer}, or choose aug-pe",
        ),
        (
            chosen.publish and another and not texts_evolve(settings),
            f"the texts of method {name!r} are what its adapter writes, and {writer} asks another writer",
            f"remove {writer}, or choose a method whose texts evolve, such as pe-sgd or aug-pe",
        ),
        (
            not (chosen.publish or method.public_texts or chosen.warm_start_epochs),
            f"method {name!r} uses no public texts, and the group synthesis describes some",
            "set synthesis.warm_start_epochs to start from them, choose pe-sgd, or remove the group",
        ),
        (
            method.public_texts and top_k > chosen.count,
            f"method.top_k={top_k} is more than the {chosen.count} public texts that synthesis.seeds={chosen.seeds} "
            f"and variations={chosen.variations} make",
            f"set top_k to at most {chosen.count}, or to 0 for all directions; or raise synthesis.seeds",
        ),
    ):
        if wrong:
            raise ConfigError(what, fix=fix)


def texts_evolve(settings: Settings) -> bool:
    """Whether releases decide which texts stand at a run's end, so that they say something of the records."""
    chosen, method = settings.synthesis, find_row(settings.method.name)
    if chosen is None or method.public_texts != "evolving":
        return False
    return method.releases == "votes" or chosen.evolution != "none"


def refuse_unsettled(settings: Settings) -> None:
    """Raise ConfigError for settings of which something is left to rehearsals that nobody has held."""
    if settings.auto is not None and settings.auto.choose:
        fix = f"give a number; `privlora train` chooses {settings.auto.chosen_on}, and its report says what"
        raise ConfigError(f"{settings.auto.places} is auto, and nothing chooses it here", fix=fix)


def refuse_unrehearsed(settings: Settings) -> None:
    """Raise ConfigError where auto.choose names something of a row that cannot be rehearsed on public records."""
    if settings.auto is None or not settings.auto.choose:
        return
    row, names = find_row(settings.method.name), settings.auto.places
    if row.releases != "gradients" or row.public_texts or not row.private or row.charges_projections:
        fix = "give a number, or a method that adds noise to gradients, such as prism or dp-adamw"
        raise ConfigError(f"{names} cannot be auto with method {row.name!r}", fix=fix)
    if "right_weight" in settings.auto.choose:
        optimizer = row.choose_optimizer(settings.method.optimizer)
        if "right_weight" not in row.settings_of(optimizer):
            raise no_setting(row.name, optimizer, "right_weight", row.settings_of(optimizer))
    if row.coordinates.forward_only and settings.auto.file is None:
        fix = "give a number, or leave it out for the method's own; or public records as auto.file"
        raise ConfigError(f"{names} cannot be auto with method {row.name!r} and no auto.file", fix=fix)
