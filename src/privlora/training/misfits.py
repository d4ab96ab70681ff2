"""Settings that do not go with a row of the table, or with each other: told before a model is read.

Nothing here imports transformers, so that a plan says what it can at once.
"""

from __future__ import annotations

from privlora.config import Settings, SynthesisSettings
from privlora.config.methods import adds_no_noise, no_setting
from privlora.config.synthesis import OF_METHOD
from privlora.errors import ConfigError
from privlora.mechanisms import UNADAPTED
from privlora.methods import SPACES, Method, find_row, refuse_hopeless_rate
from privlora.names import PUBLIC_GRADIENT, RANDOM, SPECTRAL_SPLIT, W0_SUBSPACE
from privlora.optimizers.paper import no_start_at_zero
from privlora.training.classifier import refuse_other_rows


def refuse_misfits(settings: Settings, method: Method) -> None:
    """Raise ConfigError for settings that do not go with a row, as far as no model is needed to tell."""
    privacy = settings.privacy
    if privacy.private and not method.private:
        raise adds_no_noise(method.name)
    refuse_other_rows(settings, method)
    refuse_without_gradients(settings, method)
    if method.releases == "votes":
        refuse_what_votes_have_not(settings, method)
    if method.coordinates.dense and settings.model.quantization is not None:
        raise _clash(
            "model.quantization", method, "set no quantization", "it adds a dense update to packed weights"
        )
    _refuse_dropout(settings, method)
    if (method.coordinates.dense or method.coordinates.forward_only) and privacy.bands != 1:
        why = "each step has a projection or a direction of its own, so that no noise would be taken back"
        raise _clash(f"privacy.bands={privacy.bands}", method, "set privacy.bands=1", why)
    if method.coordinates.dense and privacy.sampling != "poisson":
        why = "a bound for projections is of Poisson sampling"
        raise _clash(f"privacy.sampling={privacy.sampling}", method, "remove privacy.sampling", why)
    if settings.method.metric_power and privacy.bands != 1:
        raise ConfigError(
            f"privacy.bands={privacy.bands} does not go with method.metric_power={settings.method.metric_power:g}",
            fix=["remove metric_power", "or remove bands, which bring little in large batches"],
        )
    clipping = settings.method.clipping or method.clipping
    if privacy.clip_quantile is not None and clipping in UNADAPTED:
        raise ConfigError(
            f"privacy.clip_quantile does nothing beside {clipping} clipping, which scales gradients to one norm",
            fix="remove clip_quantile, or set method.clipping=flat",
        )
    if privacy.clip_quantile is not None and method.charges_projections:
        why = "the count of norms is not projected, so the projection's event would not cover it"
        raise _clash("privacy.clip_quantile", method, "remove clip_quantile", why)
    refuse_hopeless_rate(settings)
    hyper = method.resolve(settings.method, settings.adapter.init, privacy.steps)
    rule = SPACES[method.space].optimizers[hyper.optimizer]
    if method.tunes_writer and hyper.init == SPECTRAL_SPLIT:
        why = "its rounds tune the model as it is, without what that start takes out of the weights"
        raise _clash(f"adapter.init={hyper.init}", method, "remove adapter.init", why)
    if not rule.leaves_zero and hyper.init in (RANDOM, W0_SUBSPACE, PUBLIC_GRADIENT):
        raise no_start_at_zero()
    if privacy.clip_quantile is not None and hyper.settings.get("hold_out"):
        raise ConfigError(
            f"privacy.clip_quantile does not go with method.hold_out={hyper.settings['hold_out']:g}",
            fix="remove clip_quantile, or set method.hold_out=0",
        )


def _clash(setting: str, method: Method, fix: str, why: str) -> ConfigError:
    return ConfigError(
        f"{setting} does not go with method {method.name!r}",
        why=why,
        fix=f"{fix}, or choose another method, such as prism or dp-adamw",
    )


def _refuse_dropout(settings: Settings, method: Method) -> None:
    """Raise ConfigError for the adapter's dropout with a row whose coordinates are built on an adapter without it."""
    kind = method.coordinates
    if settings.adapter.lora_dropout and (kind.dense or kind.forward_only or method.public_texts):
        why = "two things that it compares would be thinned out by different masks, or a whole layer by one"
        raise _clash("adapter.lora_dropout", method, "set adapter.lora_dropout=0", why)


def refuse_without_gradients(settings: Settings, method: Method) -> None:
    """Raise ConfigError where losses are compared in the place of gradients, for what does not go with that."""
    if not method.coordinates.forward_only:
        return
    if settings.model.dropout:
        why = "both losses would be those of other masks, and differ by these and not along the direction"
        raise _clash("model.dropout", method, "remove model.dropout", why)
    if settings.synthesis is not None and settings.synthesis.warm_start_epochs:
        why = "a few epochs of one direction a step learn next to nothing of public texts"
        fix = "start from an adapter that was trained on them (adapter.init)"
        raise _clash("synthesis.warm_start_epochs", method, fix, why)


def refuse_what_votes_have_not(settings: Settings, method: Method) -> None:
    """Raise ConfigError for settings of gradients, where votes are released and they would be ignored."""
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
        raise ConfigError(
            f"{name} does not go with method {method.name!r}, which releases {called} of norm 1",
            why="it would have no effect",
            fix=f"remove {name}",
        )


def refuse_missing_texts(method: Method) -> None:
    """Raise ConfigError for a row that leans on public texts: there are none."""
    if method.public_texts:
        way = f"{method.called} on" if method.releases == "votes" else "along the gradients of"
        raise ConfigError(
            f"method {method.name!r} releases {way} public texts, and none are given",
            fix="add the group synthesis, as `synthesis: {generator: model}`; or choose another method, such as prism",
        )


def refuse_unused_texts(settings: Settings) -> None:
    """Raise ConfigError if the group ``synthesis`` describes texts that nothing would read, cannot write those that are
    to be released, or has fewer than method.top_k."""
    chosen, method = settings.synthesis, find_row(settings.method.name)
    if chosen is None:
        return
    refuse_settings_of_others(chosen, method)
    if chosen.publish and not texts_evolve(settings) and chosen.generator != "model":
        raise ConfigError(
            f"the texts of method {method.name!r} are what its adapter writes, and generator={chosen.generator} asks "
            "another writer",
            fix="set synthesis.generator=model, or choose a method whose texts evolve: pe-sgd, span-prism, aug-pe",
        )
    if not (chosen.publish or method.public_texts or chosen.warm_start_epochs):
        raise ConfigError(
            f"method {method.name!r} uses no public texts, and the group synthesis describes some",
            fix="set synthesis.warm_start_epochs to start from them, choose pe-sgd, or remove the group",
        )
    directions = settings.method.top_k or 0
    if method.public_texts and directions > chosen.count:
        raise ConfigError(
            f"method.top_k={directions} is more than the {chosen.count} public texts that synthesis.seeds="
            f"{chosen.seeds} and variations={chosen.variations} make",
            fix=f"set top_k to at most {chosen.count}, or to 0 for all directions; or raise synthesis.seeds",
        )


def refuse_settings_of_others(chosen: SynthesisSettings, method: Method) -> None:
    """Raise ConfigError for settings that another method reads, or that leave this one without effect."""
    for name in sorted(chosen.given & OF_METHOD.keys()):
        if OF_METHOD[name] != method.name:
            raise ConfigError(
                f"synthesis.{name} is read by method {OF_METHOD[name]} and not by {method.name}",
                fix=f"remove it, or set method.name={OF_METHOD[name]}",
            )
    if not chosen.epochs and not method.tunes_writer:
        raise ConfigError(
            f"synthesis.epochs=0 trains no adapter of method {method.name!r}", fix="set at least 1"
        )
    if method.tunes_writer and chosen.generator != "model":
        raise ConfigError(
            f"method {method.name!r} tunes the model that writes, and generator={chosen.generator} asks another writer",
            fix="set synthesis.generator=model, or choose aug-pe",
        )


def texts_evolve(settings: Settings) -> bool:
    """Whether releases decide which texts stand at a run's end, so that they say something of the records."""
    chosen, method = settings.synthesis, find_row(settings.method.name)
    if chosen is None or method.public_texts != "evolving":
        return False
    return method.releases == "votes" or chosen.evolve_every > 0


def refuse_unsettled(settings: Settings) -> None:
    """Raise ConfigError for settings of which something is left to rehearsals that nobody has held."""
    if settings.auto is not None and settings.auto.choose:
        raise ConfigError(
            f"{settings.auto.places} is auto, and nothing chooses it here",
            fix=f"give a number; `privlora train` chooses {settings.auto.chosen_on}, and its report says what",
        )


def refuse_unrehearsed(settings: Settings) -> None:
    """Raise ConfigError where auto.choose names something of a row that cannot be rehearsed on public records."""
    if settings.auto is None or not settings.auto.choose:
        return
    row, names = find_row(settings.method.name), settings.auto.places
    if row.releases != "gradients" or row.public_texts or not row.private or row.charges_projections:
        raise ConfigError(
            f"{names} cannot be auto with method {row.name!r}",
            fix="give a number, or a method that adds noise to gradients, such as prism or dp-adamw",
        )
    if "right_weight" in settings.auto.choose:
        optimizer = row.choose_optimizer(settings.method.optimizer)
        if "right_weight" not in row.settings_of(optimizer):
            raise no_setting(row.name, optimizer, "right_weight", row.settings_of(optimizer))
    if row.coordinates.forward_only and settings.auto.file is None:
        raise ConfigError(
            f"{names} cannot be auto with method {row.name!r} and no auto.file",
            fix="give a number, or leave it out for the method's own; or public records as auto.file",
        )
