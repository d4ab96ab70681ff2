"""Everything a report says, gathered once as plain JSON. Its schema is public and versioned.

No private quantity may enter: no number of records or units, batch size, training loss, clipping fraction
or gradient norm, no clock but the day the run began on, no place on the user's machine. Here are settings, the ledger,
released parameters, noise that no step has used, losses on public records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from privlora.accounting import LedgerSummary
from privlora.adapters import LowRankAdapter, Site
from privlora.config import Settings
from privlora.config.methods import SPACES, space_in_words
from privlora.config.synthesis import OF_POPRI
from privlora.mechanisms import band_coefficients, clipping_slack
from privlora.names import EITHER, is_local, published_name
from privlora.pages.numbers import finite
from privlora.reporting.limits import limits_of
from privlora.reporting.noise import noise_on_weights
from privlora.reporting.statement import SCHEMA_VERSION, evaluation_rows, noise_facts, privacy_facts, versions
from privlora.training.assembly import Parts
from privlora.training.base_weights import weights_of
from privlora.training.promise import bands_of
from privlora.training.reach import coverage


def gather(
    parts: Parts,
    summary: LedgerSummary | None,
    evaluations: Sequence[Mapping[str, Any]],
    federation: Mapping[str, Any] | None = None,
    choice: Mapping[str, Any] | None = None,
    answers: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The report of an ended run, JSON-ready. ``summary`` None: non-private mode. ``federation`` None: one place.
    ``choice``: why the run took its method, where it was chosen on public texts. ``answers``: to public prompts."""
    report = {
        "schema_version": SCHEMA_VERSION,
        **privacy_facts(summary),
        "target_epsilon": (
            parts.settings.privacy.target_epsilon if summary is None else summary.plan.target_epsilon
        ),
        "noise": _noise(parts, summary),
        "evaluation": evaluation_rows(evaluations),
        "adapter": _adapter(parts),
        "method": _method(parts) | ({} if choice is None else {"choice": dict(choice)}),
        "versions": versions(),
        **({} if federation is None else {"federation": dict(federation)}),
        **({} if answers is None else {"answers": dict(answers)}),
        **_classes(parts.settings),
        **_preferences(parts.settings),
    }
    return {**report, "not_protected": limits_of(report)}


def _preferences(settings: Settings) -> dict[str, Any]:
    """Of a run that learns which of two answers is preferred."""
    data = settings.data
    return {} if data.chosen is None else {"preferences": {"loss": "dpo", "beta": data.beta}}


def _classes(settings: Settings) -> dict[str, Any]:
    """What a classifier gives, in the words of transformers' configurations."""
    classes = settings.data.classes
    return (
        {} if classes is None else {"classes": {"num_labels": classes.outputs, "names": list(classes.names)}}
    )


def _noise(parts: Parts, summary: LedgerSummary | None) -> dict[str, Any] | None:
    if summary is None:
        return None
    plan = summary.plan
    rank = {site.name: part.rank for part in parts.adapter.parts for site in part.sites}
    adaptive, bands = parts.adaptive, bands_of(plan)
    found = band_coefficients(bands, plan.steps) if bands > 1 else ()
    noise = noise_facts(plan, adaptive=adaptive is not None, coefficients=found)
    if parts.method.releases == "votes":  # which move no weight
        return {
            **noise,
            "clipping_slack": 0.0,
            "clip_quantile": None,
            "last_clip_norm": None,
            "intrinsic": False,
            "law": None,
            "draws": 0,
            "modules": [],
        }
    _, law = _in_words(parts)
    effect = noise_on_weights(parts.coordinates, noise["noise_std"])
    return {
        **noise,
        "clipping_slack": clipping_slack(parts.adapter, parts.hyper.clipping),
        "clip_quantile": None if adaptive is None else adaptive.quantile,
        "last_clip_norm": None if adaptive is None else adaptive.value,
        "intrinsic": parts.coordinates.intrinsic,
        "law": law,
        "draws": effect["draws"],
        "modules": [
            {
                "name": site.name,
                "m": site.m,
                "n": site.n,
                "r": rank[site.name],
                **finite(effect["modules"][site.name]),
            }
            for site in _in_model_order(parts.adapter)
        ],
    }


def _adapter(parts: Parts) -> dict[str, Any]:
    lora = parts.settings.adapter
    factors = parts.named_factors()
    base, packed = parts.settings.model.name, parts.settings.model.quantization
    return {
        "base_model": published_name(base),
        "base_is_local": is_local(base),
        "base_revision": parts.settings.model.revision,
        "base_sha256": weights_of(parts.adapter.model, classifies=parts.settings.data.classes is not None),
        **({} if packed is None else {"base_quantization": packed}),
        "rank": parts.adapter.rank,
        "lora_alpha": lora.lora_alpha,
        "use_rslora": lora.use_rslora,
        "target_modules": lora.target_modules
        if lora.target_modules != EITHER
        else parts.adapter.target_modules,
        **({"exclude_modules": lora.exclude_modules} if lora.exclude_modules else {}),
        "coverage": coverage(parts.adapter),
        "init": published_name(parts.hyper.init),
        "public_seed": parts.settings.run.seed,
        "exported": "last iterate" if parts.average is None else "average of the iterates",
        "modules": [
            {"name": site.name, "m": site.m, "n": site.n, "singular_values": _spectrum(*factors[site.name])}
            for site in _in_model_order(parts.adapter)
        ],
    }


def _in_model_order(adapter: LowRankAdapter) -> list[Site]:
    order = {name: index for index, (name, _) in enumerate(adapter.model.named_modules())}
    return sorted(adapter.sites, key=lambda site: order[site.name])


def _spectrum(a: Tensor, b: Tensor) -> list[float | None]:
    """Singular values of A B^T, descending."""
    core = torch.linalg.qr(a.double()).R @ torch.linalg.qr(b.double()).R.mT
    if not bool(core.isfinite().all()):
        return [None] * core.shape[-1]
    return [float(value) for value in torch.linalg.svdvals(core)]


def _method(parts: Parts) -> dict[str, Any]:
    method, data = parts.method, parts.settings.data
    return {
        "name": method.name,
        "summary": method.summary,
        "reference": method.reference,
        "coordinates": method.space,
        "described": _in_words(parts)[0],
        **{name: value for name, value in parts.hyper.to_dict().items() if name != "init"},
        "steps": parts.settings.privacy.steps,
        "max_length": data.max_length,
        "loss_on": data.loss_on,
        **_form(parts),
        **_chat(parts),
        "dropout": parts.settings.model.dropout,
        "lora_dropout": parts.settings.adapter.lora_dropout,
        **({"unchecked": True} if data.unchecked else {}),
        **({"compares": "losses"} if method.coordinates.forward_only else {}),
        **({"releases": method.releases} if method.releases != "gradients" else {}),
        **_public_texts(parts),
        **_span(parts),
    }


def _in_words(parts: Parts) -> tuple[str, str]:
    """In what gradients are clipped and noised, and the noise's law."""
    space, own = parts.method.space, parts.coordinates
    return space_in_words(space, parts.hyper.to_dict()) if space in SPACES else (own.described, own.noise_law)


def _form(parts: Parts) -> dict[str, Any]:
    """How a prompt and its answer are put together, where settings say it: whoever asks the adapter needs the same."""
    data = parts.settings.data
    if data.task is not None or data.completion is None or data.prompt is None:
        return {}
    return {"form": {"prompt": data.prompt, "completion": data.completion, "template": data.template}}


def _chat(parts: Parts) -> dict[str, Any]:
    """Of a chat template that is not the tokenizer's, and what it is told: whoever asks the adapter needs the same."""
    data = parts.settings.data
    facts: dict[str, Any] = {}
    if data.chat_template is not None:
        facts["chat_template_sha256"] = sha256(data.chat_template.encode()).hexdigest()
    if data.chat_template_kwargs:
        facts["chat_template_kwargs"] = dict(data.chat_template_kwargs)
    return facts


def _span(parts: Parts) -> dict[str, Any]:
    """Between which bounds the steps' choices from public gradients lay. A row a step would show where a run broke."""
    taken = parts.coordinates.taken()
    if not taken:
        return {}
    return {"span": finite({name: [f(row[name] for row in taken) for f in (min, max)] for name in taken[0]})}


def _public_texts(parts: Parts) -> dict[str, Any]:
    chosen = parts.settings.synthesis
    if chosen is None or not (parts.method.public_texts or chosen.warm_start_epochs):
        return {}  # of texts that its adapter writes afterwards the run used none
    facts: dict[str, Any] = {
        "generator": chosen.generator,
        "count": chosen.count,
        "evolves": parts.method.public_texts == "evolving" and chosen.evolution != "none",
        "warm_start_epochs": chosen.warm_start_epochs,
    }
    if parts.texts is not None and parts.texts.distinct:
        facts["distinct"] = parts.texts.distinct
    if parts.method.releases == "votes":
        facts["votes"] = {
            "embedding": None if chosen.embedding is None else published_name(chosen.embedding),
            "epochs": 0 if chosen.publish else chosen.epochs,
        }
        if parts.method.tunes_writer:
            facts["votes"] |= {name: getattr(chosen, name) for name in OF_POPRI}
        else:
            facts |= {"evolves": True}
            facts["votes"] |= {"keep": chosen.seeds}
    return {"public_texts": facts}
