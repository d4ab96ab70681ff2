"""The start from public texts: the mean gradient's own subspaces, found without it, and nothing private in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from promises import promise
from run_cases import Bench, assert_same, fingerprint
from safetensors.torch import load_file
from tiny_models import VOCAB, set_checkpointing, tiny_model, tiny_tokenizer, uneven_examples
from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.config import Settings, settings_from
from privlora.coordinates import SpanSpace, TangentCoordinates
from privlora.coordinates.starts import Subspaces
from privlora.data.examples import Example, Examples
from privlora.errors import ConfigError, DataError
from privlora.methods import METHODS
from privlora.names import PUBLIC_GRADIENT
from privlora.training import assembly
from privlora.training.assembly import PublicStart, build_parts
from privlora.training.models import unchanged_afterwards
from privlora.training.texts import public_gradients
from privlora.training.texts.public_gradients import mean_gradient_subspaces

TEXTS = [example for seed in (1, 2, 3) for example in uneven_examples(seed)]
PUBLIC = [f"a note about nothing, number {i}." for i in range(12)]
EVERY_OPTIMIZER = [
    (row.name, optimizer)
    for row in METHODS.values()
    for optimizer in row.optimizers
    if row.name != "prism-paper"  # needs factors that are not zero
]


def found_for(
    model: Any, texts: list[Example] = TEXTS, rank: int = 3, seed: int = 0, max_tokens: int = 60
) -> Subspaces:
    adapter = LowRankAdapter(model, rank=rank)
    return mean_gradient_subspaces(adapter, Examples(texts, pad_token_id=0), seed=seed, max_tokens=max_tokens)


def dense_gradients(model: Any, texts: list[Example]) -> list[dict[str, Tensor]]:
    """Of every text, by autograd on the weights: module name -> (m, n)."""
    sites = LowRankAdapter(model, rank=1).sites
    found = []
    for text in texts:
        model.zero_grad()
        ids, labels = (torch.tensor(t[None]).long() for t in (text.input_ids, text.labels))
        if bool((labels[:, 1:] >= 0).any()):
            model(input_ids=ids, labels=labels).loss.backward()
        grads = {s.name: s.module.weight.grad for s in sites}
        conv = type(sites[0].module).__name__ == "Conv1D"
        found.append({n: (g.T if conv else g).double() for n, g in grads.items() if g is not None})
    model.zero_grad()
    return found


def summed(gradients: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for gradient, weight in zip(gradients, weights, strict=True):
        for name, g in gradient.items():
            total[name] = total.get(name, torch.zeros_like(g)) + weight * g
    return total


def norm(gradient: dict[str, Tensor]) -> float:
    return sum(float(g.square().sum()) for g in gradient.values()) ** 0.5


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the texts were weighted with, by call of _product."""
    seen: list[Tensor] = []
    product = public_gradients._SumOfGradients._product

    def noted(self: Any, *args: Any, **options: Any) -> list[Tensor]:
        result = product(self, *args, **options)
        seen.append(self.weights)
        return result

    monkeypatch.setattr(public_gradients._SumOfGradients, "_product", noted)
    return seen


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("rank", [3, 8])
def test_they_are_the_dense_mean_gradients(family: str, rank: int, weights: list[Tensor]) -> None:
    model = tiny_model(family)
    found = found_for(model, rank=rank)
    total = summed(dense_gradients(model, TEXTS), weights[0].tolist())
    assert found.keys() == total.keys()
    gaps = 0
    for name, (u, v) in found.items():
        U, S, Vh = torch.linalg.svd(total[name])
        for basis in (u, v):
            torch.testing.assert_close(basis.T @ basis, torch.eye(rank).double(), atol=1e-10, rtol=0)
        captured = (u.T @ total[name] @ v).square().sum()
        assert float(captured / S[:rank].square().sum()) > 0.995
        # Every direction is sketched, and r of them stand out.
        if rank == 8 and rank < len(S) and S[rank] < 0.95 * S[rank - 1]:
            gaps += 1
            for got, want in ((u, U[:, :rank]), (v, Vh[:rank].T)):
                assert (
                    float(torch.linalg.matrix_norm(got - want @ (want.T @ got), 2)) < 1e-3
                )  # sine of the angle
    assert rank == 3 or gaps >= 3


def test_no_text_dominates(weights: list[Tensor]) -> None:
    model = tiny_model()
    norms = torch.tensor([norm(g) for g in dense_gradients(model, TEXTS)])
    for seed in range(20):  # the mean below then spreads by 0.015
        found_for(model, seed=seed)
    estimates = torch.stack(weights[::4])  # (seeds, texts), one of each run's four passes
    silent = norms == 0
    assert int(silent.sum()) == 3
    assert bool((estimates[:, silent] == 0).all())
    ratio = 1 / (estimates[:, ~silent] * norms[~silent])  # estimated norm over the true one
    assert float(ratio.square().mean()) == pytest.approx(1, abs=0.05)
    assert float(ratio.min()) > 0.5
    assert float(ratio.max()) < 1.7


def test_the_split_into_micro_batches_and_the_seed_hardly_matter() -> None:
    model = tiny_model()
    one, again = found_for(model), found_for(model)
    small, other = found_for(model, max_tokens=1), found_for(model, seed=1)
    for name, (u, v) in one.items():
        assert torch.equal(u, again[name][0])
        assert torch.equal(v, again[name][1])
        torch.testing.assert_close(u, small[name][0], atol=1e-3, rtol=0)
        assert float((u.T @ other[name][0]).square().sum()) > 0.8 * 3  # another estimate of the norms


def test_a_text_without_a_finite_gradient_counts_nothing() -> None:
    model = tiny_model()
    model.get_input_embeddings().weight.data[VOCAB - 1] = float("nan")  # a token that no other text has
    ids = TEXTS[0].input_ids.copy()
    ids[1] = VOCAB - 1
    spoiled = [*TEXTS, Example(ids, TEXTS[0].labels)]
    one, two = found_for(model), found_for(model, spoiled)
    for name in one:
        torch.testing.assert_close(one[name][0], two[name][0], atol=1e-3, rtol=0)
    silent = uneven_examples()[-1:]
    for hopeless in (spoiled[-1:], silent, silent + spoiled[-1:]):
        with pytest.raises(DataError, match="is finite and other than zero"):
            found_for(model, hopeless)


def test_a_module_that_no_text_moves_starts_at_random() -> None:
    first = Example(TEXTS[0].input_ids[:2], TEXTS[0].input_ids[:2])  # nothing to attend to but itself
    a, b, other = (found_for(tiny_model(), [first], seed=seed) for seed in (0, 0, 1))
    name = "model.layers.0.self_attn.q_proj"
    for basis, same, differs in zip(a[name], b[name], other[name], strict=True):
        torch.testing.assert_close(basis.T @ basis, torch.eye(3).double(), atol=1e-10, rtol=0)
        assert torch.equal(basis, same)
        assert float(basis.abs().max()) < 0.95  # no axis of the weights
        assert float((basis.T @ differs).square().sum()) < 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_off_and_checkpointing_stays_on(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = found_for(tiny_model())
    model = tiny_model()
    model.config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    set_checkpointing(model, reentrant=reentrant)
    model.train()
    recomputed = []
    checkpoint = torch.utils.checkpoint.checkpoint
    layer = model.model.layers[0]
    layer._gradient_checkpointing_func = lambda *a, **k: (
        recomputed.append(1) or checkpoint(*a, use_reentrant=reentrant, **k)
    )
    found = found_for(model)
    assert recomputed
    assert all(module.training for module in model.modules())
    for name, (u, _) in plain.items():
        torch.testing.assert_close(u, found[name][0], atol=1e-3, rtol=0)


# --- within a run ---


def settings(folder: Path, name: str = "prism", /, **groups: Any) -> Settings:
    public = folder / "public.txt"
    public.write_text("\n".join(PUBLIC) + "\n")
    return settings_from(
        {
            "model": {"name": "tiny"},
            "data": {"path": str(folder / "private.jsonl"), "max_length": 40},
            "privacy": promise(steps=2, batch=6, records=30, noise_multiplier=1.0),
            "adapter": {
                "r": 2,
                "init": PUBLIC_GRADIENT,
                "public_text": str(public),
                **groups.get("adapter", {}),
            },
            "method": {"name": name, **groups.get("method", {})},
            "run": groups.get("run", {}),
        }
    )


@pytest.mark.parametrize(("method", "optimizer"), EVERY_OPTIMIZER)
def test_every_method_takes_it_up_and_no_private_record_is_read(
    method: str, optimizer: str, tmp_path: Path
) -> None:
    chosen = settings(tmp_path, method, method={"optimizer": optimizer})
    if not METHODS[method].private:
        privacy = chosen.privacy.model_copy(update={"private": False, "noise_multiplier": None})
        chosen = chosen.model_copy(update={"privacy": privacy})
    model = tiny_model()
    public = PublicStart(tiny_tokenizer())
    if METHODS[method].space in ("projected", "wishart"):
        with pytest.raises(ConfigError, match="draws new ones at every step"):
            build_parts(chosen, model, public)
        return
    assert not Path(str(chosen.data.path)).exists()
    with unchanged_afterwards(model):
        parts = build_parts(chosen, model, public, lambda _: Examples(TEXTS, pad_token_id=0))
        parts.adapter.detach()
    subspaces = public.subspaces(chosen, model)
    assert all(float((a @ b.mT).abs().max()) == 0 for a, b in parts.coordinates.factors())
    found = parts.coordinates.inner if isinstance(parts.coordinates, SpanSpace) else parts.coordinates
    for g, group in enumerate(parts.adapter.groups):
        for k, site in enumerate(group.sites):
            u, v = (t.float() for t in subspaces[site.name])
            if isinstance(found, TangentCoordinates):
                point = found.points[g]
                torch.testing.assert_close(point.U[k] @ point.U[k].T, u @ u.T, atol=1e-5, rtol=0)
                torch.testing.assert_close(point.V[k] @ point.V[k].T, v @ v.T, atol=1e-5, rtol=0)
            else:
                torch.testing.assert_close(found.right[g][k] * 3**0.5, v)


def test_a_start_is_shared_where_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[int] = []

    def counted(adapter: LowRankAdapter, *args: Any, **options: Any) -> Subspaces:
        ranks.append(adapter.rank)
        return mean_gradient_subspaces(adapter, *args, **options)

    monkeypatch.setattr(assembly, "mean_gradient_subspaces", counted)
    model, public = tiny_model(), PublicStart(tiny_tokenizer())
    one = public.subspaces(settings(tmp_path), model)
    assert public.subspaces(settings(tmp_path, "ffa", method={"learning_rate": 0.1}), model) is one
    public.subspaces(settings(tmp_path, run={"seed": 1}), model)
    assert public.subspaces(settings(tmp_path), model) is one
    assert ranks == [2, 2]
    public.subspaces(settings(tmp_path, adapter={"r": 3}), model)
    assert ranks == [2, 2, 3]


def test_without_texts_it_is_refused(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    model = tiny_model()
    with pytest.raises(ConfigError, match="none are at hand"):
        build_parts(chosen, model)
    Path(str(chosen.adapter.public_text)).write_text("\n")
    with pytest.raises(DataError, match="no records in"):
        build_parts(chosen, model, PublicStart(tiny_tokenizer()))
    Path(str(chosen.adapter.public_text)).unlink()
    with pytest.raises(DataError, match="there is no file"):
        build_parts(chosen, model, PublicStart(tiny_tokenizer()))


@pytest.mark.parametrize("method", ["prism", "dp-adamw", "ffa"])
def test_a_run_from_end_to_end(method: str, bench: Bench, tmp_path: Path) -> None:
    public = tmp_path / "public.txt"
    public.write_text("\n".join(PUBLIC))
    before = fingerprint(bench.model)
    adapter = {"r": 2, "init": PUBLIC_GRADIENT, "public_text": str(public)}
    result = bench.start(tmp_path / "run", method=method, adapter=adapter)
    assert_same(before, fingerprint(bench.model))
    report = json.loads((result.release / "privacy_report.json").read_text())
    assert report["adapter"]["init"] == PUBLIC_GRADIENT
    assert any("adapter.public_text" in text for text in report["not_protected"])
    weights = load_file(result.release / "adapter_model.safetensors")
    assert all(bool(t.isfinite().all()) for t in weights.values())
    assert any(bool(t.any()) for t in weights.values())


@pytest.mark.usefixtures("quick_reports")
def test_an_interrupted_run_goes_on_from_its_checkpoint(bench: Bench, tmp_path: Path) -> None:
    public = tmp_path / "public.txt"
    public.write_text("\n".join(PUBLIC))

    adapter = {"r": 2, "init": PUBLIC_GRADIENT, "public_text": str(public)}
    bench.stopped(tmp_path / "run", 5, adapter=adapter)
    saved = load_file(tmp_path / "run/private/checkpoint.safetensors")
    seen: list[dict[str, Tensor]] = []
    load = TangentCoordinates.load_state_dict

    def noted(self: TangentCoordinates, tensors: Any) -> None:
        load(self, tensors)
        seen.append(self.state_dict())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TangentCoordinates, "load_state_dict", noted)
        assert bench.resume(tmp_path / "run").epsilon is not None
    for name, tensor in seen[0].items():
        assert any(torch.equal(tensor, t) for key, t in saved.items() if key.endswith(name))
