"""``privlora plan``: what a run will cost and need, without reading a private record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from privlora.accounting import Accountant, Adjacency, Plan, accountant_versions, epsilon
from privlora.accounting.meaning import Meaning, in_words, meaning
from privlora.cli.accounting import facts_of_bands, words_of_bands
from privlora.cli.console import JsonOption, accounting, argument, emit, option, quiet_libraries, refuse_given
from privlora.cli.example import example_rows
from privlora.cli.recommending import show_sizes
from privlora.cli.training import OverridesArgument
from privlora.config import Settings, load_settings
from privlora.config.auto import of_few
from privlora.config.methods import SPACES, facts_of
from privlora.consoles import err, loading, out, saying
from privlora.errors import DataError, ModelError, PrivacyError, Together
from privlora.pages.numbers import in_one_unit
from privlora.randomness import aes_instructions
from privlora.rounding import rounded_up
from privlora.training.preflight import missing_files, refuse_no_model

if TYPE_CHECKING:
    from rich.console import Console

    from privlora.methods import Hyperparameters, Method

_REPLACE_ONE: Adjacency = "replace-one"
_Rows = list[tuple[str, str]]


def plan(
    config: Annotated[Path, argument("CONFIG|RUN", "YAML of a run, or the folder of a finished one.")],
    overrides: OverridesArgument = None,
    verbose: Annotated[bool, option("Every number and limit of the promise.", "--verbose", "-v")] = False,
    cross_check: Annotated[bool, option("Also epsilon by RDP and PRV accountants.", "--cross-check")] = False,
    advise: Annotated[
        bool, option("Also rehearse methods for several numbers of records; minutes.", "--advise")
    ] = False,
    sizes: Annotated[
        bool, option("Instead: what more passes and other epsilons would bring.", "--sizes")
    ] = False,
    public: Annotated[
        Path | None, option("With --sizes: PUBLIC records to rehearse on.", metavar="FILE")
    ] = None,
    minutes: Annotated[
        float | None, option("With --sizes: time steps here, and mark what takes so long.", min=0.01)
    ] = None,
    tokens: Annotated[int | None, option("With --minutes: tokens of a record.", min=2)] = None,
    page: Annotated[
        Path | None, option("With --sizes: also write a page with curves.", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Dry run of CONFIG: what is promised, trained and needed. Reads no private record.

    With --sizes, and of the folder of a finished run: what other sizes of it would bring.
    """
    flags = {"--cross-check": cross_check, "--advise": advise, "--verbose": verbose}
    of_one: dict[str, object] = {name: True for name, value in flags.items() if value}
    of_sizes = {"--public": public, "--minutes": minutes, "--tokens": tokens, "--page": page}
    if config.is_dir():
        of_one |= {"GROUP.KEY=VALUE": overrides} if overrides else {}
        refuse_given(of_one, "does not go with the folder of a run", fix="leave it out, or give a YAML")
    elif sizes:
        refuse_given(of_one, "does not go with --sizes", fix="leave out one of them")
    else:
        refuse_given(of_sizes, "is of sizes", fix="add --sizes, or give the folder of a finished run")
        _show_plan(load_settings(config, overrides or ()), verbose, cross_check, advise, as_json)
        return
    show_sizes(config, overrides or [], public, minutes, tokens, page, as_json)


def _show_plan(settings: Settings, verbose: bool, cross_check: bool, advise: bool, as_json: bool) -> None:
    shown = out()  # inside, what libraries print goes to stderr
    missing = _refuse_missing(settings)
    if missing is not None and err().is_terminal:  # to whoever waits; the plan itself says it, too
        err().print(f"note: {missing}. The plan goes on without the records")
    if settings.federation is None:
        content, rows = _plan_run(settings, verbose, cross_check, advise, missing, None if as_json else shown)
    else:
        refuse_given({"--advise": advise or None}, "does not go with a federation", fix="leave it out")
        with quiet_libraries(told=True):
            with loading():
                from privlora.cli.federation_plan import plan_federation
            content, rows = plan_federation(settings, cross_check)
    if as_json:
        emit(content)
        return
    _print_rows(rows if verbose else _in_brief(rows, content), shown)
    if verbose:
        _print_list("not protected:", content["not_protected"], shown)
    else:
        shown.print(f"{'output':<12}{settings.run.output}")
        others = "other records of the same person, " if settings.privacy.unit == "record" else ""
        shown.print(
            f"not protected: what many records have in common, {others}and more. `privlora plan --verbose` lists all "
            "of it, and every number."
        )
    if advise:
        from privlora.cli.advising import advice_lines

        for line in advice_lines(content["advice"]):
            shown.print(line)
    if content["refused_here"]:  # last, where it is seen
        _print_list("`privlora train` is refused on this machine:", content["refused_here"], shown)


def _plan_run(
    settings: Settings,
    verbose: bool,
    cross_check: bool,
    advise: bool,
    missing: DataError | None,
    shown: Console | None,
) -> tuple[dict[str, Any], _Rows]:
    """What follows from the settings and the model's configuration, and the lines of the model. shown: where those of
    the settings are printed as soon as they are known, if at all."""
    with quiet_libraries(told=True):
        with loading():  # of torch alone, so that what follows from settings is there at once
            from privlora.methods import find_row
            from privlora.training.misfits import refuse_misfits, refuse_unrehearsed
            from privlora.training.promise import bands_of, plan_privacy

        refuse_unrehearsed(settings)
        method = find_row(settings.method.name)
        refuse_misfits(settings, method)
        if advise or settings.synthesis is not None or method.public_texts:
            with loading():
                from privlora.rehearsals.choosing import rows_to_advise_on
            _look_at_public_texts(settings, method, advise)
            if advise:
                rows_to_advise_on(settings)
        with accounting(settings.privacy.steps):
            planned = plan_privacy(settings) if settings.privacy.private else None
            cost = _cost(planned, cross_check) if planned is not None and not planned.insecure_noise else None
        privacy, bands = settings.privacy, 1 if planned is None else bands_of(planned)
        hyper = method.resolve(
            settings.method, settings.adapter.init, privacy.steps, private=privacy.private, bands=bands
        )
        content = _facts(settings, hyper, planned, bands) | {"cost": cost}
        rows = [] if shown is None else _privacy_rows(content, planned)
        rows = rows if verbose else _in_brief(rows, content)
        if shown is not None and shown.is_terminal:  # to whoever waits; elsewhere nothing is half a plan
            _print_rows(rows, shown)
            rows = []
        with loading():
            from privlora.cli.memory import as_planned, estimate_memory
            from privlora.reporting.limits import not_protected
            from privlora.training.models import adapter_for
            from privlora.training.reach import coverage

        settings, model, tokenizer = local_model(settings)
        shows = [] if tokenizer is None else example_rows(settings.data, tokenizer)
        fitted = memory = None
        refused = refused_here(settings, model) + ([] if missing is None else [str(missing)])
        if shown is not None:
            _print_rows(rows, shown)
        if model is not None:
            settings, fitted = as_planned(settings, model)
            memory = estimate_memory(settings, method, model)
        statement = statement_of(planned, None if cost is None else cost["epsilon"])
        written = settings.synthesis is not None
        content |= {
            "example": dict(shows),
            "model": settings.model.model_dump(mode="json", include=set(_LOADING)),
            "refused_here": refused,
            "memory": memory,
            "coverage": None if model is None else coverage(adapter_for(settings, model)),
            "tokens_per_micro_batch": settings.run.tokens_per_micro_batch,
            "not_protected": not_protected(
                statement, hyper.init, written=written, unchecked=settings.data.unchecked
            ),
        }
        if advise:
            from privlora.cli.advising import advise_on

            content["advice"] = advise_on(settings, planned)
    return content, [*shows, *_machine_rows(content, None if fitted is None else fitted.why)]


def _refuse_missing(settings: Settings) -> DataError | None:
    """Raise what `preflight` would of a model that cannot be and of public files that are not there: a plan reads no
    private record, nor a client's, so of data.path it is given what is wrong."""
    problems = Together()
    problems.of(None, refuse_no_model, settings.model.name, settings.model.revision)
    problems.found = [settings.placed(error, "model.name") for error in problems.found]
    missing = missing_files(settings) if settings.federation is None else {}
    records = missing.pop("data.path", None)
    problems.found += missing.values()
    problems.tell()
    return records


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
        refuse_unused_texts(settings.changed(synthesis={"publish": chosen.publish or not trained_on}))
    if method.tunes_writer:
        refuse_without_trl()
    refuse_unusable_texts(settings, method)


def local_model(settings: Settings) -> tuple[Settings, Any, Any]:
    """`look_at_model` of a local folder; no model and no tokenizer of others."""
    from privlora.training.classifier import head_of
    from privlora.training.models import load_skeleton, look_at_model

    if not Path(settings.model.name).expanduser().is_dir():
        return settings, None, None
    with saying("reading the model's configuration"):
        settings, model, tokenizer = look_at_model(settings)
        if settings.model.attn_implementation is not None:
            with suppress(ModelError):  # `refused_here` says it
                model = load_skeleton(settings.model, settings.model.attn_implementation, head_of(settings))
    return settings, model, tokenizer


def refused_here(settings: Settings, model: Any) -> list[str]:
    """What `privlora train` would refuse on this machine, which a plan may be for another: kernels, packages, a device.

    model: its skeleton, if there is one.
    """
    from privlora.training.classifier import head_of
    from privlora.training.models import load_skeleton, refuse_missing
    from privlora.training.sharding import wrong_in_several

    asked, problems = settings.model, Together()
    problems.of(None, refuse_missing, asked, model)
    if model is not None and asked.attn_implementation is not None:
        problems.of(None, load_skeleton, asked, asked.attn_implementation, head_of(settings))
    found = [str(error) for error in problems.found]
    if asked.fully_shard:  # which is of use in several processes alone
        found += [
            f"in several processes, since {what}. Fix: {fix}"
            for what, fix in wrong_in_several(settings, given=False)
        ]
    return found


def _facts(settings: Settings, hyper: Hyperparameters, planned: Plan | None, bands: int) -> dict[str, Any]:
    """Numbers that follow from the settings alone."""
    from privlora.mechanisms import split_noise_multiplier
    from privlora.methods import far_rate, find_row, uses_lora_alpha
    from privlora.training.promise import sampler

    privacy, adapter, auto, name = settings.privacy, settings.adapter, settings.auto, settings.method.name
    row = find_row(name)
    facts: dict[str, Any] = {
        "private": planned is not None and not planned.insecure_noise,
        "method": name,
        "releases": row.called,
        "hyperparameters": hyper.to_dict(),
        "default_rate": row.rate_of(
            privacy.steps, private=privacy.private, relative=hyper.relative_rate, bands=bands
        ),
        "far_rate": far_rate(settings, bands),
        "sampling": privacy.sampling,
        "sample_rate": privacy.q,
        "expected_batch_size": privacy.b,
        "mostly_empty": privacy.mostly_empty,
        "steps": privacy.steps,
        "unit": privacy.unit,
        "dropout": settings.model.dropout,
        "rank": adapter.r,
        "target_modules": adapter.target_modules,
        "exclude_modules": adapter.exclude_modules,
        "lora_dropout": adapter.lora_dropout,
        "lora_alpha_unused": "lora_alpha" in adapter.model_fields_set and not uses_lora_alpha(name),
        "aes_instructions": aes_instructions(),
        "rehearsed": [] if auto is None else list(auto.choose),
        "chosen_on": None if auto is None else auto.chosen_on,
        "few": None if auto is None else of_few(privacy.n, auto.passes, privacy.steps, privacy.b),
    }
    if planned is None:
        return facts
    sigma, above = planned.event.noise_multiplier, None
    on_sum = sigma if privacy.clip_quantile is None else split_noise_multiplier(sigma)[0]
    if privacy.max_batch_size is not None:  # Binomial(N, q) with the public N
        from scipy.stats import binom

        above = float(binom.sf(privacy.max_batch_size, privacy.public_dataset_size, privacy.q))
    return {
        **facts,
        "delta": planned.delta,
        "clip_norm": planned.clip_norm,
        "clip_quantile": privacy.clip_quantile,
        "noise_multiplier": sigma,
        "noise_to_batch": on_sum * planned.clip_norm / planned.expected_batch_size,
        **facts_of_bands(privacy, sampler(privacy, 0).sampling, bands),
        "probability_above_cap": above,
        "adjacency": planned.adjacency,
        "accountant": "pld",
        "versions": accountant_versions(),
    }


def rate_rows(content: Mapping[str, Any]) -> _Rows:
    """That a learning rate is far from the method's own, or the unit in which it is where it is not in entries.

    content: far_rate, hyperparameters and default_rate of a plan.
    """
    if content["far_rate"] is not None:
        return [("rate", content["far_rate"])]
    if not content["hyperparameters"]["relative_rate"]:
        return []
    facts = facts_of(content["method"])
    said = "" if facts is None else f": {SPACES[facts.space].relative}"
    return [("rate", f"relative{said}; the method's default is {content['default_rate']:.3g}")]


def noise_rows(content: Mapping[str, Any], planned: Plan) -> _Rows:
    """What the words of a promise mean (unit, adjacency, delta), and the noise multiplier."""
    how = "replaced by another" if planned.adjacency == _REPLACE_ONE else "there or not"
    return [
        (
            "unit",
            f"one {planned.unit}: what is released is nearly the same whether any one {planned.unit} was {how} "
            f"(adjacency {planned.adjacency}); delta = {planned.delta:g} adds to it, as a leak so probable would",
        ),
        ("sigma", f"{content['noise_multiplier']:.7g} (noise std / clip_norm {content['clip_norm']:g})"),
    ]


def _cost(planned: Plan, cross_check: bool) -> dict[str, Any]:
    """PLD epsilon over the run, under both adjacencies; other accountants on request."""
    steps = sorted({math.ceil(planned.steps * part) for part in (0.25, 0.5, 0.75, 1)})
    curve = [epsilon(planned.events(step), planned.delta, adjacency=planned.adjacency) for step in steps]
    return {
        "epsilon": curve[-1],
        "means": meaning(planned.phases, planned.adjacency).to_dict(),
        "over_steps": [{"step": s, "epsilon": e} for s, e in zip(steps, curve, strict=True)],
        "epsilon_replace_one": epsilon(planned.phases, planned.delta, adjacency=_REPLACE_ONE)
        if all(event.bounds_replacing for event, _ in planned.phases)
        else None,
        **(opinions(planned) if cross_check else {}),
    }


def statement_of(planned: Plan | None, spent: float | None) -> dict[str, Any] | None:
    """What `reporting.limits.not_protected` looks at. spent: epsilon, if anything is promised."""
    if planned is None or spent is None:
        return None
    event = planned.phases[-1][0]
    statement = {"epsilon": spent, "unit": planned.unit, "projections": event.projections}
    return statement | {"sampling": event.to_dict()["sampling"]}


def opinions(planned: Plan) -> dict[str, Any]:
    """Of other accountants an epsilon, or why not: neither knows truncated sampling, and PRV is an optional package."""
    found: dict[str, Any] = {}
    accountants: tuple[Accountant, ...] = ("rdp", "prv")
    for name in accountants:
        try:
            spent = epsilon(planned.phases, planned.delta, accountant=name)
            found[name] = {"epsilon": spent, "versions": accountant_versions(name)}
        except PrivacyError as error:
            found[name] = {"epsilon": None, "reason": str(error)}
    return {"cross_check": found}


def opinion_rows(content: Mapping[str, Any]) -> _Rows:
    """content: that of `opinions`, if they were asked for."""
    return [
        (name, each["reason"] if each["epsilon"] is None else f"{each['epsilon']:.4g} (second opinion)")
        for name, each in content.get("cross_check", {}).items()
    ]


def _privacy_rows(content: dict[str, Any], planned: Plan | None) -> _Rows:
    """What follows from the settings alone: the promise, the noise and its cost, the method and its rate."""
    from privlora.reporting.wording import targets_in_words

    name, hyper, unit = content["method"], content["hyperparameters"], content["unit"]
    released = content["releases"]
    votes = released != "gradients"
    rows: list[tuple[str, str | None]] = [("promise", "NOT PRIVATE: no clipping, no noise")]
    if planned is not None:
        unit_row, sigma_row = noise_rows(content, planned)
        rows = [("promise", planned.describe()), unit_row]
    if "rows" in content:
        several = " or ".join(content["rows"])
        rows.append(
            ("method", f"{name}, which is {several}, as rehearsals on public texts say; costs no epsilon")
        )
    else:
        settings = ", ".join([name, *(f"{key} {value}" for key, value in hyper.items())])
        rows.append(("method", f"{settings}; what they mean: `privlora methods {name}`"))
    if content["rehearsed"]:
        words = f"chosen {content['chosen_on']} before the run begins, at no epsilon; shown here: the default"
        rows.append(("auto", f"{' and '.join(content['rehearsed'])}: {words}"))
    rows += [
        ("adapter", f"rank {content['rank']}, target_modules {targets_in_words(content)}"),
        (
            "drawn by" if votes else "batches",
            f"{_batches(content)}, on average {content['expected_batch_size']:g}",
        ),
        ("rounds" if votes else "steps", str(content["steps"])),
        ("empty", content["mostly_empty"]),
        *([] if "rows" in content else rate_rows(content)),
        ("sizes", content["few"] and f"auto: {content['few']}"),
    ]
    if planned is not None:
        noise = f"{content['noise_to_batch']:.4g} in each coordinate of the mean (sigma C / b)"
        if votes:
            noise = f"{content['noise_multiplier']:.4g} in each text's sum of {released}; those of a {unit} have norm 1"
        bands = words_of_bands(content) if "bands" in content or "bands_by_auto" in content else None
        if "bands" in content:
            bands = f"{bands}. Best rates with bands were two to four times as large as without, and the default rate "
            bands += "grows with them"
        quantile, above = content["clip_quantile"], content["probability_above_cap"]
        text = "of the norms is where clip_norm moves, by noisy counts; they are in sigma"
        rows += [
            sigma_row,
            ("noise", noise),
            ("bands", bands),
            ("quantile", quantile and f"{quantile:g} {text}"),
            ("cap", None if above is None else f"exceeded with probability {above:.3g} a step"),
        ]
    if (cost := content["cost"]) is not None:
        over = ", ".join(f"{rounded_up(each['epsilon'])} after {each['step']}" for each in cost["over_steps"])
        replaced = "not known for this method"
        if cost["epsilon_replace_one"] is not None:
            spent = rounded_up(cost["epsilon_replace_one"])
            replaced = (
                f"{spent} if one unit is replaced by another; the promise is for adding or removing one"
            )
        rows += [
            ("epsilon", f"{over} (delta {content['delta']:g})"),
            *(
                ("means", words)
                for words in in_words(Meaning(**cost["means"]), unit, cost["over_steps"][-1]["epsilon"])
            ),
            ("replace-one", replaced),
            *opinion_rows(cost),
        ]
    if hyper.get("hold_out"):
        free = ", ".join(key for key in ("alpha", "ridge", "top_k") if key not in hyper)
        part = f"{hyper['hold_out']:.0%} of the public gradients at a time, held out"
        rows.append(("span", f"{free} chosen before each step on {part}; costs no epsilon"))
    if content["lora_alpha_unused"]:
        rows.append(("lora_alpha", f"has no effect on what {name} learns; the adapter is written with it"))
    return [(row, words) for row, words in rows if words is not None]


def _machine_rows(content: dict[str, Any], chosen: str | None) -> _Rows:
    """The model, and what a run takes of a machine. chosen: why micro-batches are as long as they are."""
    from privlora.reporting.wording import coverage_in_words

    of_model = "on" if content["dropout"] else "off"
    rows = [
        ("dropout", f"of the base model {of_model}, of the adapter {content['lora_dropout']:g}"),
        ("model", _model_line(content["model"])),
    ]
    if not content["aes_instructions"]:
        words = "this processor has no AES instructions: noise is drawn several times slower"
        rows.append(("generator", words))
    if content["coverage"] is not None:
        rows.append(("adapts", coverage_in_words(content["coverage"])))
    return [*rows, *memory_rows(content["memory"], chosen)]


def memory_rows(memory: Mapping[str, Any] | None, chosen: str | None = None) -> _Rows:
    """What a run takes of a machine. memory: of `estimate_memory`, if the model is at hand."""
    if memory is None:
        return [("memory", "unknown: the model is not a local folder")]
    peak = [] if memory["peak"] is None else [("peak", _peak_line(memory))]
    return [("memory", _memory_line(memory)), *([] if chosen is None else [("auto", chosen)]), *peak]


def _in_brief(rows: _Rows, content: Mapping[str, Any]) -> _Rows:
    """Of a plan's rows those that a person decides by."""
    from privlora.reporting.wording import targets_in_words

    brief, hyper, cost = dict[str, str](), content["hyperparameters"], content.get("cost")
    if cost is not None:
        spent = f"epsilon {rounded_up(cost['epsilon'])} at delta {content['delta']:g}"
        brief["promise"] = f"{spent}, for each {content['unit']}"
    if hyper:
        auto = "learning_rate" in content.get("rehearsed", ())
        rate = "chosen by auto" if auto else f"{hyper['learning_rate']:.3g}"
        where = f"rank {content['rank']} on {targets_in_words(content)}"
        brief["method"] = f"{content['method']}, {where}, learning rate {rate}"
    memory = content.get("memory")
    if memory is not None and memory["peak"] is not None:
        whose = " for each client" if "clients" in content else ""
        brief["peak"] = _peak_line(memory, brief=True) + whose
    hidden = _DETAILS if content["far_rate"] is None else _DETAILS - {"rate"}
    return [(name, brief.get(name, words)) for name, words in rows if name.split()[0] not in hidden]


_DETAILS: Final = frozenset(
    [
        "unit",
        "auto",
        "adapter",
        "rate",
        "sigma",
        "noise",
        "epsilon",
        "replace-one",
        "dropout",
        "model",
        "memory",
        "server",
        "releases",
        "statement",
    ]
)
"""Rows that are shown with --verbose alone."""


def _batches(content: dict[str, Any]) -> str:
    if "bands" in content:
        return (
            f"Poisson from {content['bands']} classes in turn, q {content['rate_of_a_class']:.6g} of a class"
        )
    if content["sampling"] == "balls-in-bins":
        return f"each {content['unit']} in one of every {round(1 / content['sample_rate'])} steps"
    return f"Poisson, q {content['sample_rate']:.6g}"


def _print_rows(rows: _Rows, shown: Console) -> None:
    for name, text in rows:
        shown.print(f"{name:<12}{text}")


def _print_list(title: str, sentences: list[str], shown: Console) -> None:
    shown.print(title)
    for sentence in sentences:
        shown.print(f"  - {sentence}")


_LOADING = {
    "dtype": "{}",
    "quantization": "{}",
    "attn_implementation": "{}",
    "gradient_checkpointing": "{}",
    "device_map": "{}, and sizes are of all its devices together",
    "device": "{}",
    "fully_shard": "true, and sizes are of one process",
}
"""Settings of group model that say how it is loaded -> how they are shown."""


def _model_line(model: Mapping[str, Any]) -> str:
    """How it is loaded, in the names of the settings; what is left to transformers is not said."""
    asked = {**model, "dtype": "that of its files" if model["dtype"] == "auto" else model["dtype"]}
    if model["device_map"] is not None:
        asked["device"] = None
    return "; ".join(
        f"{name} {words.format(asked[name])}"
        for name, words in _LOADING.items()
        if asked[name] not in (None, "none") and (name != "fully_shard" or asked[name])
    )


def _memory_line(memory: Mapping[str, Any]) -> str:
    """What a run keeps, in words."""
    kept = {
        "dense updates {}": memory["update_bytes"],
        "public gradients {} (on the device if twice as much is free)": memory["public_bytes"],
        "directions of records and texts {}": memory["embedding_bytes"],
        "keys and values while the model writes texts, up to {}": memory["cache_bytes"],
    }
    say = in_one_unit(
        memory["weight_bytes"], *kept.values(), memory["gradient_bytes"], memory["gradient_bytes_at_most"]
    )
    numbers = f"{memory['trained_numbers']:,} trained numbers"
    if memory["trained_numbers"] == 1:
        numbers = f"{memory['adapter_bytes'] // 4:,} trained numbers, moved by one a step,"
    gradients = "no per-example gradients"
    if memory["gradient_bytes"]:
        records, of_batch = memory["records_per_micro_batch"], memory["records_of_a_batch"]
        most = ", the most that a batch has but for one step in 10^9" if records == of_batch else ""
        gradients = (
            f"per-example gradients {say(memory['gradient_bytes'])} in a micro-batch of {records} records of full "
            f"length{most}, at most {say(memory['gradient_bytes_at_most'])} in one of short ones"
        )
    noise = memory["kept_noise_bytes"]
    return "; ".join(
        [
            *(words.format(say(size)) for words, size in kept.items() if size),
            f"weights {say(memory['weight_bytes'])}",
            f"{numbers} in {memory['modules']} modules",
            gradients,
            *([f"kept noise {in_one_unit(noise)(noise)}"] if noise else []),
        ]
    )


def _peak_line(memory: Mapping[str, Any], brief: bool = False) -> str:
    step = memory["peak"]["step_bytes"]
    sizes = {"model": memory["peak"]["model_bytes"], "step": step}
    whole, spare = sum(sizes.values()), ""
    if memory["resident_bytes"] and memory["device"] == "cpu":
        sizes["Python and its packages"] = memory["resident_bytes"]
        whole += memory["resident_bytes"]
        spare = f", and up to {in_one_unit(whole)(step)} more that the C library may hold"
    say = in_one_unit(whole, step)
    if brief:
        return f"about {say(whole)} of memory"
    return f"about {say(whole)} ({', '.join(f'{name} {say(size)}' for name, size in sizes.items())}){spare}"
