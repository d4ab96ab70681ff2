"""``privlora plan``: what a run will cost and need, without reading a private record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privlora.accounting import Accountant, Adjacency, Plan, accountant_versions, epsilon
from privlora.accounting.meaning import Meaning, in_words, meaning
from privlora.cli.accounting import facts_of_bands, words_of_bands
from privlora.cli.console import JsonOption, accounting, emit, err, loading, out, quiet_libraries, saying
from privlora.cli.example import example_rows
from privlora.cli.training import ConfigArgument, OverridesArgument
from privlora.config import Settings, load_settings
from privlora.config.auto import of_few
from privlora.config.methods import SPACES, facts_of
from privlora.errors import ConfigError, ModelError, PrivacyError, Together
from privlora.pages.numbers import in_one_unit
from privlora.randomness import aes_instructions
from privlora.rounding import rounded_up
from privlora.training.model_files import refuse_unfit_files
from privlora.training.model_names import refuse_no_model
from privlora.training.sources import check_sources, missing_records

if TYPE_CHECKING:
    from rich.console import Console

    from privlora.cli.memory import MemoryEstimate
    from privlora.methods import Hyperparameters, Method

_QUARTERS = (0.25, 0.5, 0.75, 1.0)
_REPLACE_ONE: Adjacency = "replace-one"


def plan(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    cross_check: Annotated[
        bool, typer.Option("--cross-check", help="Also epsilon by the RDP and PRV accountants.")
    ] = False,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise",
            help="Also rehearse PRISM and a method of public texts on the group synthesis, for several numbers of "
            "records. Loads the model.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Dry run: sampling, noise, epsilon over time, memory, and what is not protected. Reads no private record."""
    asked = settings = load_settings(config, overrides or ())
    _refuse_missing(settings)
    if settings.federation is not None:
        if advise:
            raise ConfigError("--advise does not go with a federation", fix="leave it out")
        _plan_federation(settings, cross_check, as_json)
        return
    missing = missing_records(settings)
    if missing is not None and err().is_terminal:  # to whoever waits; the plan itself says it, too
        err().print(f"note: {missing}. The plan goes on without the records")
    shown = out()  # inside, what libraries print goes to stderr
    with quiet_libraries(told=True):
        with loading():  # of torch alone, so that what follows from settings is there at once
            from privlora.methods import CHOICES, far_rate, find_row
            from privlora.training.cycles import bands_of
            from privlora.training.misfits import refuse_misfits, refuse_unrehearsed
            from privlora.training.promise import plan_privacy

        choice = CHOICES.get(settings.method.name)
        if choice is not None:
            from privlora.rehearsals.choosing import rows_of_choice

            settings = rows_of_choice(settings)[-1]  # the one that needs more memory; all else is the same
        refuse_unrehearsed(settings)
        method = find_row(settings.method.name)
        refuse_misfits(settings, method)
        if advise or settings.synthesis is not None or method.public_texts:
            with loading():
                from privlora.rehearsals.choosing import rows_to_advise_on
            _look_at_public_texts(settings, method, advise)
            if advise:
                rows_to_advise_on(asked)
        with accounting(settings.privacy.steps):
            planned = plan_privacy(settings)[0] if settings.privacy.private else None
            cost = _cost(planned, cross_check) if planned is not None and not planned.insecure_noise else None
        privacy, bands = settings.privacy, 1 if planned is None else bands_of(planned)
        hyper = method.resolve(
            settings.method, settings.adapter.init, privacy.steps, private=privacy.private, bands=bands
        )
        facts = {
            **_facts(settings, hyper, planned),
            "far_rate": far_rate(asked, bands),
            "mostly_empty": settings.privacy.mostly_empty,
            **({} if choice is None else {"method": choice.name, "rows": choice.rows, "hyperparameters": {}}),
            "cost": cost,
        }
        rows = [] if as_json else _privacy_rows(facts, planned)
        if shown.is_terminal:  # to whoever waits; elsewhere nothing is half a plan
            _print(rows, shown)
        with loading():
            from privlora.cli.memory import as_planned, estimate_memory, with_peak
            from privlora.reporting.limits import not_protected
            from privlora.training.models import adapter_for
            from privlora.training.reach import coverage

        with _reading(settings):
            settings, model, tokenizer = local_model(settings)
        shows = [] if tokenizer is None else example_rows(settings.data, tokenizer)
        refused = refused_here(settings, model) + ([] if missing is None else [str(missing)])
        if not shown.is_terminal:
            _print(rows, shown)
        fitted = memory = None
        if model is not None:
            settings, fitted = as_planned(settings, model)
            memory = with_peak(estimate_memory(settings, method, model), settings, model)
        statement = None
        if planned is not None and cost is not None:
            sampling = planned.event.to_dict()["sampling"]
            statement = {
                "epsilon": cost["epsilon"],
                "unit": planned.unit,
                "sampling": sampling,
                "projections": planned.event.projections,
            }
        limits = not_protected(statement, hyper.init, written=settings.synthesis is not None)
        content = {
            **facts,
            "example": dict(shows),
            "model": settings.model.model_dump(mode="json", include=set(_LOADING)),
            "refused_here": refused,
            "memory": memory.to_dict() if memory is not None else None,
            "coverage": None if model is None else coverage(adapter_for(settings, model)),
            "tokens_per_micro_batch": settings.run.tokens_per_micro_batch,
            "not_protected": limits,
        }
        if advise:
            from privlora.cli.advising import advise_on

            content["advice"] = advise_on(asked, planned)
    if as_json:
        emit(content)
        return
    of_memory = _memory_line(memory)
    _print(shows, shown)
    _print(_machine_rows(content, memory, None if fitted is None else fitted.why, of_memory), shown)
    _print_list("not protected:", limits, shown)
    if advise:
        from privlora.cli.advising import show_advice

        show_advice(content["advice"])
    if refused:  # last, where it is seen
        _print_list("`privlora train` is refused on this machine:", refused, shown)


def _refuse_missing(settings: Settings) -> None:
    """Raise what `refuse_first` would of a model that cannot be, of what its own files rule out, and of public files
    that are not there: a plan reads no private record, nor a client's."""
    problems = Together()
    problems.of(None, refuse_no_model, settings.model)
    problems.found = [settings.placed(error, "model.name") for error in problems.found]
    if not problems.found:
        problems.of(None, refuse_unfit_files, settings)
    if settings.federation is None:
        problems.of(None, check_sources, settings, ())
    problems.tell()


def _look_at_public_texts(settings: Settings, method: Method, advise: bool) -> None:
    """Raise what `privlora train` would of public files and of the group synthesis. Nothing private is read."""
    from privlora.training.misfits import refuse_missing_texts, refuse_unused_texts
    from privlora.training.texts.preferences import refuse_without_trl
    from privlora.training.texts.synthetic_texts import refuse_unusable_texts

    chosen = settings.synthesis
    if chosen is None:
        refuse_missing_texts(method)
        return
    trained_on = method.public_texts or chosen.warm_start_epochs
    if trained_on or not advise:  # an advice rehearses on them, whatever the row
        # Else they are what `privlora synthesize` releases.
        publish = chosen.model_copy(update={"publish": chosen.publish or not trained_on})
        refuse_unused_texts(settings.model_copy(update={"synthesis": publish}))
    if method.tunes_writer:
        refuse_without_trl()
    refuse_unusable_texts(settings, method)


def _plan_federation(settings: Settings, cross_check: bool, as_json: bool) -> None:
    with quiet_libraries(told=True):
        with loading():
            from privlora.cli.federation_plan import plan_federation

        with _reading(settings):
            settings, model, _ = local_model(settings)
        with accounting(settings.privacy.steps):
            content, rows = plan_federation(settings, model, _opinions if cross_check else None)
    if as_json:
        emit(content)
    else:
        _print(rows, out())
        _print_list("not protected:", content["not_protected"], out())


def _reading(settings: Settings) -> AbstractContextManager[None]:
    here = Path(settings.model.name).expanduser().is_dir()
    return saying("reading the model's configuration") if here else nullcontext()


def local_model(settings: Settings) -> tuple[Settings, Any, Any]:
    """The base model without weights, checked as far as it goes without them, and its tokenizer; None and None if it is
    not a local folder.

    Also the settings, as far as they follow from the model.
    """
    from privlora.training.classifier import head_of
    from privlora.training.inputs import fitted
    from privlora.training.model_checks import refuse_out_of_reach
    from privlora.training.models import load_skeleton, load_tokenizer, loadable_adapter

    if not Path(settings.model.name).expanduser().is_dir():
        return settings, None, None
    try:
        model = load_skeleton(settings.model, settings.model.attn_implementation, head_of(settings))
    except ModelError:  # what else is wrong is raised here; the attention is in `refused_here`
        model = load_skeleton(settings.model, head=head_of(settings))
    settings = fitted(settings, model)
    tokenizer = load_tokenizer(settings.model)
    refuse_out_of_reach(model, tokenizer, max_length=settings.data.max_length)
    loadable_adapter(settings, model)  # what it refuses is no matter of memory, which may not be asked for
    return settings, model, tokenizer


def refused_here(settings: Settings, model: Any) -> list[str]:
    """What `privlora train` would refuse on this machine, which a plan may be for another: kernels, packages, a device.

    model: its skeleton, if there is one.
    """
    from privlora.training.classifier import head_of
    from privlora.training.models import load_skeleton, refuse_missing
    from privlora.training.sharding import wrong_in_several

    asked, found = settings.model, list[str]()
    attention = None if model is None else asked.attn_implementation
    looks: list[Callable[[], Any]] = [partial(refuse_missing, asked, model)]
    if attention is not None:
        looks.append(partial(load_skeleton, asked, attention, head_of(settings)))
    for look in looks:
        try:
            look()
        except (ConfigError, ModelError) as error:
            found.append(str(error))
    if asked.fully_shard:  # which is of use in several processes alone
        found += [
            f"in several processes, since {what}. Fix: {fix}"
            for what, fix in wrong_in_several(settings, given=False)
        ]
    return found


def _facts(settings: Settings, hyper: Hyperparameters, planned: Plan | None) -> dict[str, Any]:
    """Numbers that follow from the settings alone."""
    from privlora.mechanisms import split_noise_multiplier
    from privlora.methods import find_row, uses_lora_alpha
    from privlora.training.cycles import bands_of

    privacy = settings.privacy
    bands = 1 if planned is None else bands_of(planned)
    default = find_row(settings.method.name).rate_of(
        privacy.steps, private=privacy.private, relative=hyper.relative_rate, bands=bands
    )
    facts: dict[str, Any] = {
        "private": planned is not None and not planned.insecure_noise,
        "method": settings.method.name,
        "releases": find_row(settings.method.name).called,
        "hyperparameters": hyper.to_dict(),
        "default_rate": default,
        "sampling": privacy.sampling,
        "sample_rate": privacy.q,
        "expected_batch_size": privacy.b,
        "steps": privacy.steps,
        "unit": privacy.unit,
        "dropout": settings.model.dropout,
        "rank": settings.adapter.r,
        "target_modules": settings.adapter.target_modules,
        "exclude_modules": settings.adapter.exclude_modules,
        "lora_dropout": settings.adapter.lora_dropout,
        "lora_alpha_unused": "lora_alpha" in settings.adapter.model_fields_set
        and not uses_lora_alpha(settings.method.name),
        "aes_instructions": aes_instructions(),
        "rehearsed": [] if settings.auto is None else list(settings.auto.choose),
        "chosen_on": None if settings.auto is None else settings.auto.chosen_on,
        "few": None
        if settings.auto is None
        else of_few(privacy.n, settings.auto.passes, privacy.steps, privacy.b),
    }
    if planned is None:
        return facts
    sigma = planned.event.noise_multiplier
    on_sum = sigma if privacy.clip_quantile is None else split_noise_multiplier(sigma)[0]
    return {
        **facts,
        "delta": planned.delta,
        "clip_norm": planned.clip_norm,
        "clip_quantile": privacy.clip_quantile,
        "noise_multiplier": sigma,
        "noise_to_batch": on_sum * planned.clip_norm / planned.expected_batch_size,
        **_bands(settings, planned),
        "probability_above_cap": _overflow(settings),
        "adjacency": planned.adjacency,
        "accountant": "pld",
        "versions": accountant_versions(),
    }


def rate_rows(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """That a learning rate is far from the row's own, or the unit in which it is where it is not in entries.

    content: far_rate, hyperparameters and default_rate of a plan.
    """
    if content["far_rate"] is not None:
        return [("rate", content["far_rate"])]
    if not content["hyperparameters"]["relative_rate"]:
        return []
    facts = facts_of(content["method"])
    said = "" if facts is None else f": {SPACES[facts.space].relative}"
    return [("rate", f"relative{said}; the method's default is {content['default_rate']:.3g}")]


def words_of_unit(planned: Plan) -> str:
    """What the words of a promise mean: unit, adjacency, delta."""
    how = "replaced by another" if planned.adjacency == _REPLACE_ONE else "there or not"
    return (
        f"one {planned.unit}: what is released is nearly the same whether any one {planned.unit} was {how} (adjacency "
        f"{planned.adjacency}), except with a chance of roughly delta = {planned.delta:g}"
    )


def _bands(settings: Settings, planned: Plan) -> dict[str, Any]:
    """Of correlated noise: its bands, and by how much it is larger in single steps and smaller in their sums."""
    from privlora.training.cycles import bands_of
    from privlora.training.promise import sampler

    return facts_of_bands(settings.privacy, sampler(settings.privacy, 0).sampling, bands_of(planned))


def _overflow(settings: Settings) -> float | None:
    """P(batch > cap) of one step, Binomial(N, q) with the public N; None without a cap."""
    privacy = settings.privacy
    if privacy.max_batch_size is None:
        return None
    from scipy.stats import binom

    return float(binom.sf(privacy.max_batch_size, privacy.public_dataset_size, privacy.q))


def _cost(planned: Plan, cross_check: bool) -> dict[str, Any]:
    """PLD epsilon over the run, under both adjacencies; other accountants on request."""
    steps = sorted({math.ceil(planned.steps * part) for part in _QUARTERS})
    curve = [epsilon(planned.events(step), planned.delta, adjacency=planned.adjacency) for step in steps]
    cost = {
        "epsilon": curve[-1],
        "means": meaning(planned.phases, planned.adjacency).to_dict(),
        "over_steps": [{"step": s, "epsilon": e} for s, e in zip(steps, curve, strict=True)],
        "epsilon_replace_one": epsilon(planned.phases, planned.delta, adjacency=_REPLACE_ONE)
        if all(event.bounds_replacing for event, _ in planned.phases)
        else None,
    }
    if cross_check:
        cost["cross_check"] = _opinions(planned)
    return cost


def _opinions(planned: Plan) -> dict[str, Any]:
    accountants: tuple[Accountant, ...] = ("rdp", "prv")
    return {name: _second_opinion(name, planned) for name in accountants}


def _second_opinion(accountant: Accountant, planned: Plan) -> dict[str, Any]:
    """Its epsilon, or why it has none: neither knows truncated sampling, and PRV is an optional package."""
    try:
        found = epsilon(planned.phases, planned.delta, accountant=accountant)
    except PrivacyError as error:
        return {"epsilon": None, "reason": str(error)}
    return {"epsilon": found, "versions": accountant_versions(accountant)}


def _privacy_rows(content: dict[str, Any], planned: Plan | None) -> list[tuple[str, str]]:
    """What follows from the settings alone: the promise, the noise and its cost, the method and its rate."""
    from privlora.reporting.wording import targets_in_words

    settings = [f"{name} {value}" for name, value in content["hyperparameters"].items()]
    if "rows" in content:
        settings = [
            f"which is {' or '.join(content['rows'])}, as rehearsals on public texts say; costs no epsilon"
        ]
    meant = f"; what they mean: `privlora methods {content['method']}`" * bool(content["hyperparameters"])
    released = content["releases"]
    votes = released != "gradients"
    rows = [
        (
            "method",
            ", ".join([content["method"], *settings]) + meant,
        ),
        ("adapter", f"rank {content['rank']}, target_modules {targets_in_words(content)}"),
        (
            "drawn by" if votes else "batches",
            f"{_batches(content)}, on average {content['expected_batch_size']:g}",
        ),
        ("rounds" if votes else "steps", str(content["steps"])),
    ]
    if content["mostly_empty"] is not None:
        rows.append(("empty", content["mostly_empty"]))
    if "rows" not in content:
        rows += rate_rows(content)
    if content["rehearsed"]:
        names = " and ".join(content["rehearsed"])
        words = f"chosen {content['chosen_on']} before the run begins, at no epsilon; what stands here is the default"
        rows.insert(1, ("auto", f"{names}: {words}"))
    if content["few"] is not None:
        rows.append(("sizes", f"auto: {content['few']}"))
    if planned is None:
        rows.insert(0, ("promise", "NOT PRIVATE: no clipping, no noise"))
    else:
        rows[:0] = [("promise", planned.describe()), ("unit", words_of_unit(planned))]
        rows += [
            ("sigma", f"{content['noise_multiplier']:.7g} (noise std / clip_norm {content['clip_norm']:g})"),
            (
                "noise",
                f"{content['noise_multiplier']:.4g} in each text's sum of {released}; those of a {content['unit']} "
                "have norm 1"
                if votes
                else f"{content['noise_to_batch']:.4g} in each coordinate of the mean (sigma C / b)",
            ),
        ]
        if "bands" in content:
            rows.append(("bands", _bands_line(content)))
        elif "bands_by_auto" in content:
            rows.append(("bands", words_of_bands(content)))
        if content["clip_quantile"] is not None:
            text = "of the norms is where clip_norm moves, by noisy counts; they are in sigma"
            rows.append(("quantile", f"{content['clip_quantile']:g} {text}"))
        if content["probability_above_cap"] is not None:
            rows.append(("cap", f"exceeded with probability {content['probability_above_cap']:.3g} a step"))
    if content["cost"] is not None:
        rows += _cost_rows(content["cost"], content["delta"], content["unit"])
    if content["hyperparameters"].get("hold_out"):
        free = [name for name in ("alpha", "ridge", "top_k") if name not in content["hyperparameters"]]
        part = f"{content['hyperparameters']['hold_out']:.0%} of the public gradients at a time, held out"
        rows.append(("span", f"{', '.join(free)} chosen before each step on {part}; costs no epsilon"))
    if content["lora_alpha_unused"]:
        rows.append(
            (
                "lora_alpha",
                f"has no effect on what {content['method']} learns; the adapter is written with it",
            )
        )
    return rows


def _machine_rows(
    content: dict[str, Any], memory: MemoryEstimate | None, chosen: str | None, of_memory: str
) -> list[tuple[str, str]]:
    """The model, and what a run takes of a machine. chosen: why micro-batches are as long as they are."""
    from privlora.reporting.wording import coverage_in_words

    rows = [
        ("dropout", _dropout_line(content["dropout"], content["lora_dropout"])),
        ("model", _model_line(content["model"])),
    ]
    if not content["aes_instructions"]:
        rows.append(
            ("generator", "this processor has no AES instructions: noise is drawn several times slower")
        )
    if memory is not None and "bands" in content:
        kept = memory.kept_noise_bytes
        of_memory += f"; kept noise {in_one_unit(kept)(kept)}"
    if content["coverage"] is not None:
        rows.append(("adapts", coverage_in_words(content["coverage"])))
    rows.append(("memory", of_memory))
    if chosen is not None:
        rows.append(("auto", chosen))
    if memory is not None and (memory.peak is not None or memory.peak_unknown is not None):
        rows.append(("peak", _peak_line(memory, on_cpu=memory.device == "cpu")))
    return rows


def _bands_line(content: dict[str, Any]) -> str:
    """What correlated noise does in steps and in their sums, and what is known of such a row."""
    rates = "Best rates with bands were two to four times as large as without, and the default rate grows with them"
    return f"{words_of_bands(content)}. {rates}"


def _batches(content: dict[str, Any]) -> str:
    if "bands" not in content:
        if content["sampling"] == "balls-in-bins":
            return f"each {content['unit']} in one of every {round(1 / content['sample_rate'])} steps"
        return f"Poisson, q {content['sample_rate']:.6g}"
    return f"Poisson from {content['bands']} classes in turn, q {content['rate_of_a_class']:.6g} of a class"


def _print(rows: list[tuple[str, str]], shown: Console) -> None:
    for name, text in rows:
        shown.print(f"{name:<12}{text}")


def _print_list(title: str, sentences: list[str], shown: Console) -> None:
    shown.print(title)
    for sentence in sentences:
        shown.print(f"  - {sentence}")


def _cost_rows(cost: dict[str, Any], delta: float, unit: str) -> list[tuple[str, str]]:
    over = ", ".join(f"{rounded_up(point['epsilon'])} after {point['step']}" for point in cost["over_steps"])
    replace_one = cost["epsilon_replace_one"]
    rows = [
        ("epsilon", f"{over} (delta {delta:g})"),
        *(("means", words) for words in in_words(Meaning(**cost["means"]), unit)),
        (
            "replace-one",
            "not known for this method"
            if replace_one is None
            else f"{rounded_up(replace_one)} for one unit replaced by another; promised is the epsilon above",
        ),
    ]
    for name, opinion in cost.get("cross_check", {}).items():
        known = opinion["epsilon"] is not None
        rows.append((name, f"{opinion['epsilon']:.4g} (second opinion)" if known else opinion["reason"]))
    return rows


def _dropout_line(of_model: bool, of_adapter: float) -> str:
    return f"of the base model {'on' if of_model else 'off'}, of the adapter {of_adapter:g}"


_LOADING = (
    "dtype",
    "quantization",
    "attn_implementation",
    "gradient_checkpointing",
    "device",
    "device_map",
    "fully_shard",
)


def _model_line(model: Mapping[str, Any]) -> str:
    """How it is loaded, in the names of the settings; what is left to transformers is not said."""
    asked = {
        "dtype": model["dtype"] if model["dtype"] != "auto" else "that of its files",
        "quantization": model["quantization"],
        "attn_implementation": model["attn_implementation"],
        "gradient_checkpointing": model["gradient_checkpointing"],
        "device_map": model["device_map"]
        and f"{model['device_map']}, and sizes are of all its devices together",
        "device": model["device"] if model["device_map"] is None else None,
        "fully_shard": "true, and sizes are of one process" if model["fully_shard"] else None,
    }
    return "; ".join(f"{name} {words}" for name, words in asked.items() if words not in (None, "none"))


def _memory_line(memory: MemoryEstimate | None) -> str:
    if memory is None:
        return "unknown: the model is not a local folder"
    kept = (memory.update_bytes, memory.public_bytes, memory.embedding_bytes, memory.cache_bytes)
    gradients = (memory.gradient_bytes, memory.gradient_bytes_at_most)
    say = in_one_unit(memory.weight_bytes, *kept, *gradients)

    def part(name: str, size: int, where: str = "") -> str:
        return f"{name} {say(size)}{where}; " if size else ""

    numbers = f"{memory.trained_numbers:,} trained numbers"
    if memory.trained_numbers == 1:
        numbers = f"{memory.adapter_bytes // 4:,} trained numbers, moved by one a step,"
    line = (
        part("dense updates", memory.update_bytes)
        + part("public gradients", memory.public_bytes, " (on the device if twice as much is free)")
        + part("directions of records and texts", memory.embedding_bytes)
        + part("keys and values while the model writes texts, up to", memory.cache_bytes)
        + f"weights {say(memory.weight_bytes)}; {numbers} in {memory.modules} modules; "
    )
    if memory.gradient_bytes:
        whole = memory.records_per_micro_batch == memory.records_of_a_batch
        line += (
            f"per-example gradients {say(memory.gradient_bytes)} in a micro-batch of "
            f"{memory.records_per_micro_batch} records of full length"
            + (", the most that a batch has but for one step in 10^9" if whole else "")
            + f", at most {say(memory.gradient_bytes_at_most)} in one of short ones; "
        )
    else:
        line += "no per-example gradients; "
    return line.removesuffix("; ")


def _peak_line(memory: MemoryEstimate, *, on_cpu: bool) -> str:
    if memory.peak is None:
        return f"of a step is not known: {memory.peak_unknown}"
    peak, python = memory.peak, memory.resident_bytes
    whole = peak.step_bytes + peak.model_bytes
    say = in_one_unit(peak.step_bytes, whole)
    line = (
        f"a step takes {say(peak.step_bytes)} at its most, {say(whole)} with the model: in a micro-batch of "
        f"{peak.rows} rows of {peak.width} tokens, all of them labels"
    )
    if not python or not on_cpu:
        return line
    return (
        f"{line}; with Python and its packages ({say(python)} in this command) about {say(whole + python)}, and up to "
        f"{say(peak.step_bytes)} more that the C library's heap may keep"
    )
