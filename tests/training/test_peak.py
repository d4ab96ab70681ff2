"""What a step takes at its most: over the micro-batches that can occur, and what stands for many layers or units."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, tiny_llama

from privlora.config import PrivacySettings, Settings, settings_from
from privlora.training import peak
from privlora.training.footprint import roughly
from privlora.training.model_checks import steady_width
from privlora.training.models import adapter_for
from privlora.training.peak import (
    Rows,
    Unknown,
    bound_of_a_step,
    largest_batch,
    peak_of_a_step,
    worst_batches,
)

CPU = torch.device("cpu")


def privacy(**given: object) -> PrivacySettings:
    base = {"steps": 3, "noise_multiplier": 1.0, "delta": 1e-6, "public_dataset_size": 100_000}
    return PrivacySettings(**{**base, "expected_batch_size": 5000, **given})


def settings(method: str = "dp-adamw", length: int = 12, **groups: object) -> Settings:
    given = {
        "model": {"name": "random"},
        "data": {"path": "(in memory)", "max_length": length},
        "adapter": {"r": 2, "init": "random"},
        "method": {"name": method},
        "privacy": {
            "steps": 3,
            "noise_multiplier": 1.0,
            "delta": 1e-4,
            "public_dataset_size": 4000,
            "expected_batch_size": 400,
        },
    }
    return settings_from({**given, **groups}, source="test")


def shapes(found: list[Rows]) -> list[tuple[int, int]]:
    return [(each.count, each.width) for each in found]


def test_the_worst_are_the_longest_rows_and_the_most_rows() -> None:
    of = {"of_a_unit": 1, "max_tokens": 4096, "row_tokens": 16, "columns": 1}
    assert shapes(worst_batches(privacy(), max_length=512, **of)) == [(8, 512), (9, 455), (256, 16)]
    # 13 rows of 300 tokens leave 196: 14 rows of 292 do not.
    assert shapes(worst_batches(privacy(), max_length=300, **of))[:2] == [(13, 300), (14, 292)]
    assert shapes(worst_batches(privacy(), max_length=8, **of)) == [(256, 8)]
    # A row that is longer than all that is allowed is a micro-batch by itself.
    assert shapes(worst_batches(privacy(), max_length=5000, **of))[0] == (1, 5000)


def test_below_float32_rows_are_padded_most_where_they_end_a_block() -> None:
    found = worst_batches(privacy(), of_a_unit=1, max_tokens=4096, max_length=512, row_tokens=20, columns=32)
    assert shapes(found)[-3:] == [(128, 32), (170, 24), (204, 20)]


def test_no_more_rows_than_a_batch_has() -> None:
    few = privacy(expected_batch_size=5, max_batch_size=7)
    found = worst_batches(few, of_a_unit=1, max_tokens=4096, max_length=100, row_tokens=16, columns=1)
    assert shapes(found) == [(7, 100), (7, 16)]


def test_a_batch_is_bounded_by_public_numbers_alone() -> None:
    assert largest_batch(privacy(max_batch_size=6000)) == 6000
    assert 5000 + 5 * 70 < largest_batch(privacy()) < 5000 + 7 * 70
    assert largest_batch(privacy(expected_batch_size=None, sample_rate=1.0)) == 100_000


def test_rows_of_users_are_added_up() -> None:
    of_users = privacy(unit="user", user_column="who", max_records_per_user=10)
    found = worst_batches(of_users, of_a_unit=10, max_tokens=40, max_length=20, row_tokens=4, columns=1)
    assert found == [
        Rows((2,), 20),
        Rows((10,), 20),  # one user with all records, beyond what is allowed
        Rows((2, 1), 13),
        Rows((10,), 13),
        Rows((2, *(1,) * 8), 4),
    ]


def test_many_layers_go_on_from_one_and_two(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = tiny_llama(num_hidden_layers=5, vocab_size=300), [Rows((1,) * 8, 12)]
    adapter = adapter_for(settings(), model)
    quick = peak._bytes(settings(), model, adapter, CPU, batches)
    monkeypatch.setattr(peak, "_FEW", (100, 101))
    assert peak._bytes(settings(), model, adapter, CPU, batches) == pytest.approx(quick, rel=0.02)


def test_layers_of_several_kinds_are_all_taken() -> None:
    plain = tiny_llama(num_hidden_layers=4)
    mixed = tiny_llama(num_hidden_layers=4)
    mixed.config.layer_types = ["sliding_attention", "full_attention"] * 2
    assert peak._equal_layers(plain, adapter_for(settings(), plain)) == 4
    assert peak._equal_layers(mixed, adapter_for(settings(), mixed)) == 0
    some = settings(adapter={"r": 2, "layers_to_transform": [0, 2]})
    assert peak._equal_layers(plain, adapter_for(some, plain)) == 0


def _automatic(method: str) -> Settings:
    given = settings(method)
    return given.model_copy(update={"method": given.method.model_copy(update={"clipping": "automatic"})})


def test_units_that_go_alone_stand_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each phase by itself: what is the largest of few units need not be that of many."""
    given, model, asked = settings("dp-adamw"), tiny_llama(), list[int]()

    def grows(*given: Any) -> dict[Rows, dict[str, int]]:
        asked.extend(len(batch.rows) for batch in given[4])
        return {
            batch: {"forward": 100 + 7 * len(batch.rows) + batch.width, "release": 200} for batch in given[4]
        }

    monkeypatch.setattr(peak, "_of_layers", grows)
    adapter, batches = adapter_for(given, model), [Rows((1,) * 40, 9), Rows((1,), 70)]
    expected = {batches[0]: 100 + 7 * 40 + 9, batches[1]: 200}
    assert peak._bytes(given, model, adapter, CPU, batches) == expected
    assert sorted(asked) == [1, 40]
    asked.clear()
    assert peak._bytes(_automatic("dp-adamw"), model, adapter, CPU, batches) == expected
    assert max(asked) == 3


@pytest.mark.parametrize("method", ["prism", pytest.param("dp-adamw", marks=pytest.mark.long)])
def test_many_units_that_go_alone_take_what_few_say(method: str) -> None:
    """Of few units a release takes more than all else; of many, what is clipped at once."""
    given, model, batch = (
        _automatic(method),
        tiny_llama(num_hidden_layers=1, vocab_size=16),
        Rows((1,) * 12, 4),
    )
    adapter = adapter_for(given, model)
    whole = peak._of_layers(given, model, adapter, CPU, [batch])[batch]
    assert max(whole.values()) > 1.2 * whole["release"]
    found = peak._of_units(given, model, adapter, CPU, [batch])[batch]
    assert found == pytest.approx(whole, rel=0.05)
    bound = roughly(adapter, 12, 4)
    assert bound is not None
    assert max(whole.values()) < 0.3 * bound
    far, near = roughly(adapter, 1, 8000), roughly(adapter, 1, 4000)
    assert far is not None
    assert near is not None
    assert far > 3 * near  # scores of attention


def test_more_tokens_take_more_and_the_model_is_left_alone() -> None:
    model = tiny_llama()
    before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    heard = list[tuple[int, int]]()

    def told(*done: int) -> None:
        heard.append(done)

    sizes = [peak_of_a_step(settings(), model, CPU, max_tokens=n, told=told) for n in (24, 2400)]
    steps = [found.step_bytes for found in sizes if found is not None]
    total = heard[0][1]
    assert heard[: total + 1] == [(n, total) for n in range(total + 1)]  # each micro-batch moves the bar
    bounds = [bound_of_a_step(settings(), model, max_tokens=n) for n in (24, 2400)]
    assert all(2 * takes < bound < math.inf for takes, bound in zip(steps, bounds, strict=True))
    assert len(set(steps)) == 2
    assert steps == sorted(steps)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0])
        assert p.requires_grad == before[name][1]
    assert not any(module._forward_hooks for module in model.modules())


def test_below_float32_the_bound_is_of_rows_as_they_are_padded() -> None:
    """Else micro-batches are made to fit without what padding adds, and a step of long records ends in full memory."""
    given, model = settings(), tiny_llama().to(torch.bfloat16)
    adapter, batches = peak._counted(given, model, 400)
    assert adapter.reduced_precision
    widths = [(batch, steady_width(adapter, batch.width)) for batch in batches]
    assert all(width > batch.width for batch, width in widths)
    padded = [roughly(adapter, batch.count, width) for batch, width in widths]
    bound = bound_of_a_step(given, model, max_tokens=400)
    assert all(each is not None and each <= bound for each in padded)


def test_rows_without_a_private_step_have_none_and_rows_on_public_texts_are_not_known() -> None:
    model = tiny_llama()
    written = {"generator": "model"}
    assert peak_of_a_step(settings("aug-pe", synthesis=written), model, CPU, max_tokens=64) is None
    with pytest.raises(Unknown, match="public texts"):
        peak_of_a_step(settings("pe-sgd", synthesis=written), model, CPU, max_tokens=64)


def test_packed_weights_are_not_known_wherever_it_is_said() -> None:
    given = settings(model={"name": "random", "quantization": "4bit"})
    with pytest.raises(Unknown, match="packed weights"):
        peak_of_a_step(given, tiny_llama(), CPU, max_tokens=64)
    folder = tiny_llama()
    folder.config.quantization_config = {"load_in_4bit": True}
    with pytest.raises(Unknown, match="packed weights"):
        peak_of_a_step(settings(), folder, CPU, max_tokens=64)


def test_what_cannot_be_done_on_paper_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(vocab_size=VOCAB)

    def reads_values(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("needs values")

    monkeypatch.setattr(model.model.layers[0].mlp, "forward", reads_values)
    with pytest.raises(Unknown, match="needs values"):
        peak_of_a_step(settings(), model, CPU, max_tokens=64)


def test_models_of_more_than_linear_layers_have_no_bound() -> None:
    model = tiny_llama()
    assert bound_of_a_step(settings(), model, max_tokens=64) < math.inf
    model.model.layers[0].mlp.state = torch.nn.Parameter(torch.zeros(2, 3))
    assert bound_of_a_step(settings(), model, max_tokens=64) == math.inf
    del model.model.layers[0].mlp.state
    adapter = adapter_for(settings(), model)
    model.config = SimpleNamespace(num_hidden_layers=2)
    assert roughly(adapter, 4, 16) is None
    with pytest.raises(Unknown, match="public texts"):
        bound_of_a_step(settings("pe-sgd", synthesis={"generator": "model"}), tiny_llama(), max_tokens=64)


def test_the_papers_start_is_counted_too() -> None:
    given = settings("prism", adapter={"r": 2, "init": "spectral-split"})
    given = given.model_copy(update={"method": given.method.model_copy(update={"optimizer": "paper"})})
    found = peak.peak_of_a_step(given, tiny_llama(), CPU, max_tokens=64)
    assert found is not None
    assert found.step_bytes > 0


def test_no_weights_are_needed() -> None:
    with_weights, batches = tiny_llama(), [Rows((1,) * 4, 9)]
    with torch.device("meta"):
        without = type(with_weights)(with_weights.config).eval()
    found = [
        peak._phases(settings(), model, CPU, batches, None)[batches[0]] for model in (with_weights, without)
    ]
    assert found[0] == found[1]
