"""Generation in batches with a cache is generation of one prompt at a time without one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evaluation_cases import strong_adapter
from tiny_models import FAMILIES, everything_in_double, tiny_model, tiny_tokenizer, with_lora
from tokenizers import decoders

from privlora.data.examples import encode_prompts
from privlora.errors import ConfigError, ModelError
from privlora.evaluation.generation import Sampling, generate, generate_tokens

PROMPTS = ["hello", "a", "what is the name", "12 and 30", "to be or not to be"]
TOKENIZER = tiny_tokenizer()
TOKENIZER.backend_tokenizer.decoder = decoders.Fuse()  # characters follow each other without blanks


def ids(prompts: list[str] = PROMPTS) -> list[np.ndarray]:
    return encode_prompts(prompts, TOKENIZER, max_length=64)


def greedy_loop(model: torch.nn.Module, prompt: np.ndarray, steps: int) -> str:
    """One token after another with whole forward passes."""
    tokens = prompt.tolist()
    for _ in range(steps):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
        if token == TOKENIZER.eos_token_id:
            break
        tokens.append(token)
    return TOKENIZER.decode(tokens[len(prompt) :], skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_plain_loop(family: str) -> None:
    with everything_in_double():
        model = tiny_model(family, dtype=torch.float64)
        expected = [greedy_loop(model, prompt, 10) for prompt in ids()]
        for settings in ({}, {"use_cache": False}, {"max_tokens": 1}, {"max_tokens": 70}):
            found = generate(model, TOKENIZER, ids(), max_new_tokens=10, **settings)
            assert found == expected
    assert len(set(expected)) > 1


def test_beams_are_the_same_in_batches() -> None:
    model = tiny_model(dtype=torch.float64)
    for beams in (2, 4):
        together = generate(model, TOKENIZER, ids(), max_new_tokens=8, num_beams=beams)
        alone = [
            generate(model, TOKENIZER, [prompt], max_new_tokens=8, num_beams=beams)[0] for prompt in ids()
        ]
        assert together == alone


def test_the_models_own_habits_are_not_used() -> None:
    model = tiny_model()
    expected = generate(model, TOKENIZER, ids(), max_new_tokens=10)
    model.generation_config.update(
        do_sample=True,
        temperature=5.0,
        repetition_penalty=3.0,
        num_beams=3,
        no_repeat_ngram_size=1,
        min_length=9,
    )
    assert generate(model, TOKENIZER, ids(), max_new_tokens=10) == expected


def test_ends_at_eos_and_stop_strings() -> None:
    model = tiny_model()
    (whole,) = generate(model, TOKENIZER, ids(["hello"]), max_new_tokens=20)
    assert len(whole) > 6
    (cut,) = generate(model, TOKENIZER, ids(["hello"]), max_new_tokens=20, stop=[whole[3:5]])
    assert cut == whole[: whole.index(whole[3:5])]
    end = TOKENIZER.convert_tokens_to_ids(whole[2])
    model.generation_config.eos_token_id = [2, end]  # as models with several ends of a turn have
    (ended,) = generate(model, TOKENIZER, ids(["hello"]), max_new_tokens=20)
    assert ended == whole[: whole.index(whole[2])]


def test_rows_that_end_early_do_not_change_the_others() -> None:
    model = tiny_model()
    plain = generate(model, TOKENIZER, ids(), max_new_tokens=12)
    stop = [plain[0][:2]]
    found = generate(model, TOKENIZER, ids(), max_new_tokens=12, stop=stop)
    assert found == [text.split(stop[0])[0] for text in plain]
    assert found[0] == ""


def test_no_padding_token_is_needed() -> None:
    bare = tiny_tokenizer()
    bare.backend_tokenizer.decoder = decoders.Fuse()
    bare.pad_token = None
    model = tiny_model()
    model.generation_config.pad_token_id = None
    found = generate(model, bare, ids(), max_new_tokens=10)
    assert found == generate(model, TOKENIZER, ids(), max_new_tokens=10)


def test_an_attached_adapter_and_a_peft_model_count() -> None:
    model = tiny_model(dtype=torch.float64)
    base = generate(model, TOKENIZER, ids(), max_new_tokens=10)
    with strong_adapter(model):
        adapted = generate(model, TOKENIZER, ids(), max_new_tokens=10)
        assert adapted == [greedy_loop(model, prompt, 10) for prompt in ids()]
    assert adapted != base
    wrapped = with_lora(tiny_model(dtype=torch.float64), init_lora_weights=False)
    wrapped.train()
    found = generate(wrapped, TOKENIZER, ids(), max_new_tokens=10)
    assert wrapped.training
    wrapped.eval()
    assert found == [greedy_loop(wrapped, prompt, 10) for prompt in ids()]


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 0}, {"num_beams": 0}, {"prompts": [np.array([], int)]}])
def test_refused(wrong: dict[str, object]) -> None:
    arguments = {"prompts": ids(), "max_new_tokens": 3, **wrong}
    with pytest.raises(ConfigError):
        generate(tiny_model(), TOKENIZER, **arguments)


def drawn(model: torch.nn.Module, prompts: list[np.ndarray], **how: object) -> list[list[int]]:
    """``new`` tokens of each prompt; ``batch``: the bound on a batch."""
    new, batch = how.pop("new", 8), how.pop("batch", 8192)
    sampling = Sampling(**{"key": 5, **how})
    return generate_tokens(model, TOKENIZER, prompts, max_new_tokens=new, max_tokens=batch, sampling=sampling)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_draws_have_the_models_law(temperature: float) -> None:
    model, count = tiny_model(), 4000
    (prompt,) = ids(["hello"])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(prompt[None])).logits[0, -1].double()
    law = (logits / temperature).softmax(dim=0)
    rows = drawn(model, [prompt] * count, new=1, temperature=temperature)
    ends = law[TOKENIZER.eos_token_id].item()  # such rows are empty
    found = torch.bincount(torch.tensor([row[0] for row in rows if row]), minlength=len(law)) / count
    found[TOKENIZER.eos_token_id] = sum(not row for row in rows) / count
    assert ends < 0.5
    assert ((found - law).abs() < 5 * (law * (1 - law) / count).sqrt() + 1e-9).all()
    assert (law > 0.02).sum() > 2


def test_a_prompts_draws_know_no_batch() -> None:
    model = tiny_model(dtype=torch.float64)
    together = drawn(model, ids())
    assert together == drawn(model, ids(), batch=1)
    assert together[:2] == drawn(model, ids()[:2])
    same = drawn(model, ids(["hello"]) * 6, temperature=3.0)
    assert len({tuple(row) for row in same}) == 6  # each has a stream of its own


def test_a_key_is_repeated_and_torchs_generator_is_left_alone() -> None:
    model = tiny_model()
    before = torch.get_rng_state()
    first = drawn(model, ids(), key=2**70 + 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert drawn(model, ids(), key=2**70 + 1) == first
    assert drawn(model, ids(), key=2**70 + 2) != first


def test_without_heat_the_most_probable_are_drawn() -> None:
    model = tiny_model(dtype=torch.float64)
    greedy = generate_tokens(model, TOKENIZER, ids(), max_new_tokens=8)
    assert drawn(model, ids(), temperature=1e-9) == greedy


def test_sampling_refused() -> None:
    model = tiny_model()
    for wrong in ({"temperature": 0.0}, {"temperature": float("nan")}):
        with pytest.raises(ConfigError):
            Sampling(key=0, **wrong)
    with pytest.raises(ConfigError, match="beams"):
        generate_tokens(model, TOKENIZER, ids(), max_new_tokens=2, num_beams=2, sampling=Sampling(0))
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match="not numbers"):
        drawn(model, ids())
