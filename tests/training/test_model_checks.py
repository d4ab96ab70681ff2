"""Models that are no causal LMs of independent rows are refused on random tokens; those that are pass, in any dtype."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from cli_cases import save_tiny_model
from promises import small_settings
from run_cases import PRIVACY, assert_same, fingerprint
from tiny_models import FAMILIES, VOCAB, set_checkpointing, tiny_model, tiny_tokenizer

from privlora import fine_tune
from privlora.adapters import LowRankAdapter
from privlora.config import ModelSettings
from privlora.data.examples import Example, Examples
from privlora.errors import DataError, ModelError
from privlora.training.model_checks import (
    refuse_coupled,
    refuse_float16,
    refuse_out_of_reach,
    refuse_too_short,
    refuse_unknown_tokens,
    routes_tokens,
)
from privlora.training.models import check_model, load_model

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
}
SMALL |= {
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def mixture() -> Any:
    config = hf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return hf.MixtralForCausalLM(config).eval()


def bert(*, is_decoder: bool = False) -> Any:
    return hf.BertLMHeadModel(hf.BertConfig(**SMALL, is_decoder=is_decoder)).eval()


def probe(model: Any, **options: Any) -> None:
    refuse_coupled(LowRankAdapter(model, rank=2, **options), tiny_tokenizer())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_causal_models_pass(family: str, dtype: torch.dtype) -> None:
    probe(tiny_model(family, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixture_of_experts_passes(dtype: torch.dtype) -> None:
    for _ in range(3):
        probe(mixture().to(dtype))


def test_a_decoder_of_the_same_kind_passes() -> None:
    probe(bert(is_decoder=True))


class _Altered(torch.nn.Module):
    """A causal LM whose embeddings go through ``change`` before its first layer."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.inner = tiny_model()
        self.config, self.change = self.inner.config, change

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.inner.get_output_embeddings()

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return self.inner(inputs_embeds=self.change(self.get_input_embeddings()(input_ids)), **options)


def altered(change: Any) -> Any:
    return _Altered(change).eval()


COUPLED = {
    "a mean over the batch": lambda x: x + 0.1 * x.mean(dim=0, keepdim=True),
    "the row above": lambda x: x + 0.1 * x.roll(1, dims=0),
    "the row below": lambda x: x + 0.1 * x.roll(-1, dims=0),
    "the first row": lambda x: x + 0.1 * x[:1],
    "the row above, from its middle on": lambda x: (
        x + 0.1 * x.roll(1, dims=0) * (torch.arange(x.shape[1]) >= 4)[:, None]
    ),
    "its place in the batch": lambda x: x * torch.arange(1.0, 1 + len(x))[:, None, None],
}


class _SeesPadding(_Altered):
    """Each row is scaled by how long the row above it is."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        above = options["attention_mask"].sum(dim=1).roll(1)[:, None, None]
        embedded = self.get_input_embeddings()(input_ids) * (1 + 0.1 * above)
        return self.inner(inputs_embeds=embedded, **options)


AHEAD = {
    "the next token": lambda x: x + 0.1 * torch.cat([x[:, 1:], x[:, -1:]], dim=1),
    "one of the middle": lambda x: x + 0.1 * x[:, 5:6],
    "a mean over the row": lambda x: x + 0.1 * x.mean(dim=1, keepdim=True),
}


@pytest.mark.parametrize("name", COUPLED)
def test_models_that_couple_rows_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="couples the rows of a batch"):
        probe(altered(COUPLED[name]))


def test_rows_that_are_coupled_by_their_padding_are_refused() -> None:
    with pytest.raises(ModelError, match="couples the rows of a batch"):
        probe(_SeesPadding(lambda x: x).eval())


@pytest.mark.parametrize("place", [0, 2])
def test_one_row_that_moves_is_rounding(place: int) -> None:
    """In the last pass one of the two rows that are compared meets, say, another expert; a dependence moves both."""
    passes = itertools.count()

    def change(x: torch.Tensor) -> torch.Tensor:
        moved = (torch.arange(len(x)) == place)[:, None, None]
        return x + 0.1 * moved * (next(passes) == 2)

    probe(altered(change))


STRANGE_HEADS = {
    "tokens first": lambda head, s: head(s.transpose(0, 1)).transpose(0, 1),
    "another row's states": lambda head, s: head(s.roll(1, dims=0)).roll(-1, dims=0),
    "another token's states": lambda head, s: head(s.flip(1)).flip(1),
    "all in one row": lambda head, s: head(s.flatten(0, 1)).reshape(*s.shape[:2], -1),
    "by a keyword": lambda head, s: head(input=s),
    "scaled by its place": lambda head, s: head(s) * torch.arange(1.0, 1 + s.shape[1])[:, None],
    "beside itself": lambda head, s: torch.nn.functional.linear(s, head.weight),
}


def with_head(name: str, model: Any = None) -> Any:
    """A causal LM of independent rows whose output layer is used as STRANGE_HEADS says."""
    model = tiny_model() if model is None else model

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        states = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return SimpleNamespace(logits=STRANGE_HEADS[name](model.lm_head, states))

    model.forward = forward
    return model


@pytest.mark.parametrize("name", STRANGE_HEADS)
def test_models_whose_labels_would_meet_the_states_of_others_are_refused(name: str) -> None:
    """Where tokens came first, one record that left moved a clipped sum by 5 C."""
    with pytest.raises(ModelError, match="output layer") as caught:
        probe(with_head(name))
    assert "record" in str(caught.value)
    assert "Fix: use a model" in str(caught.value)


def test_what_follows_an_output_layer_may_follow_it() -> None:
    model = tiny_model()
    whole = model.forward

    def forward(**inputs: Any) -> Any:
        return SimpleNamespace(logits=whole(**inputs).logits.tanh()[..., : VOCAB - 4])

    model.forward = forward
    probe(model)


def test_a_probe_leaves_the_output_layer_to_train() -> None:
    model = tiny_model()
    probe(model)
    assert model.lm_head.weight.requires_grad


@pytest.mark.parametrize("name", AHEAD)
def test_models_that_look_ahead_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="a later token changes what it predicts earlier"):
        probe(altered(AHEAD[name]))


def test_what_is_altered_without_harm_passes() -> None:
    probe(altered(lambda x: x + 0.1 * x.cumsum(dim=1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_encoder_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match="not causal"):
        probe(bert().to(dtype))


def test_a_model_that_puts_tokens_first_is_refused() -> None:
    config = hf.XLNetConfig(vocab_size=VOCAB, d_model=16, n_layer=2, n_head=2, d_inner=24)
    with pytest.raises(ModelError, match=r"gets input of shape \(8, 3, 16\) for 3 rows of 8 tokens"):
        probe(hf.XLNetLMHeadModel(config).eval(), target_modules=["layer_1", "layer_2"])


def test_a_layer_that_text_does_not_reach_is_refused() -> None:
    model = tiny_model()
    model.unused = torch.nn.Linear(16, 16)
    with pytest.raises(ModelError, match="module 'unused' is not used"):
        probe(model)


def test_a_model_that_does_not_run_or_has_no_numbers() -> None:
    with pytest.raises(ModelError, match="does not run on a batch of tokens"):
        probe(altered(lambda x: x @ torch.zeros(3, 3)))
    with pytest.raises(ModelError, match="no numbers for every token"):
        probe(altered(lambda x: x * float("nan")))


def settings(**groups: dict[str, Any]) -> Any:
    return small_settings(data={"path": "x.txt", "max_length": 40}, adapter={"r": 2}, **groups)


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_the_model_stays_as_it_was(reentrant: bool | None) -> None:
    model = tiny_model("gpt2").train()
    model.transformer.h[0].eval()
    if reentrant is not None:
        set_checkpointing(model, reentrant=reentrant)
    before, drawn = fingerprint(model), torch.get_rng_state()
    check_model(settings(), model, tiny_tokenizer())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert_same(before, fingerprint(model))


def test_dropout_of_a_model_in_training_mode_is_no_dependence() -> None:
    config = hf.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=64)
    check_model(settings(), hf.GPT2LMHeadModel(config).train(), tiny_tokenizer())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox", "gemma3", "phi3"])
def test_records_longer_than_the_positions(family: str) -> None:
    model, tokenizer = tiny_model(family), tiny_tokenizer()
    positions = model.config.max_position_embeddings
    refuse_out_of_reach(model, tokenizer, max_length=positions)
    with pytest.raises(ModelError, match=f"max_length={positions + 1} exceeds the {positions} positions"):
        refuse_out_of_reach(model, tokenizer, max_length=positions + 1)


def test_stretched_and_unbounded_positions() -> None:
    stretched = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    }
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, rope_parameters=stretched))
    refuse_out_of_reach(model, tiny_tokenizer(), max_length=256)
    with pytest.raises(ModelError, match="exceeds the 256 positions"):
        refuse_out_of_reach(model, tiny_tokenizer(), max_length=257)
    unbounded = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2))
    refuse_out_of_reach(unbounded, tiny_tokenizer(), max_length=10**6)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_a_long_record_would_stretch_for_all(kind: str) -> None:
    """One long record changes the positions of the rows beside it; dynamic ones stay changed."""
    rotary: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    config: dict[str, Any] = {**SMALL, "max_position_embeddings": 64}
    if kind == "longrope":
        halves = {"short_factor": [1.0] * 2, "long_factor": [4.0] * 2}
        rotary |= {"original_max_position_embeddings": 64, **halves}
        config["max_position_embeddings"] = 256
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**config, rope_parameters=rotary)).eval()
    refuse_out_of_reach(model, tiny_tokenizer(), max_length=64)
    probe(model)
    with pytest.raises(ModelError, match="exceeds the 64 positions"):
        refuse_out_of_reach(model, tiny_tokenizer(), max_length=65)


def test_positions_that_no_setting_tells() -> None:
    config = hf.MptConfig(d_model=16, n_heads=2, n_layers=1, max_seq_len=32, vocab_size=VOCAB)
    model = hf.MptForCausalLM(config).eval()
    with pytest.raises(ModelError, match="exceeds the 32 positions"):
        refuse_out_of_reach(model, tiny_tokenizer(), max_length=33)
    adapter = LowRankAdapter(model, rank=2)
    refuse_too_short(adapter, tiny_tokenizer(), max_length=32)
    with pytest.raises(ModelError, match=r"with data\.max_length=33, the model does not run"):
        refuse_too_short(adapter, tiny_tokenizer(), max_length=33)


def test_a_tokenizer_of_another_model() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model()
    refuse_out_of_reach(model, tokenizer, max_length=40)
    tokenizer.add_tokens([f"<extra{i}>" for i in range(VOCAB)])  # beyond the embedding, but perhaps never met
    refuse_out_of_reach(model, tokenizer, max_length=40)
    last = len(tokenizer) - 1
    refuse_unknown_tokens(model, examples(example(0, VOCAB - 1), example()), examples())
    with pytest.raises(DataError, match=f"a token that the model does not know: it has {VOCAB}") as caught:
        refuse_unknown_tokens(model, examples(example()), examples(example(0, 3), example(4, last)))
    assert str(last) not in str(caught.value)
    tokenizer.pad_token = f"<extra{VOCAB - 1}>"
    with pytest.raises(
        ModelError, match=f"token ids up to {last}, but the model knows only those below {VOCAB}"
    ):
        refuse_out_of_reach(model, tokenizer, max_length=40)
    small = tiny_model()
    small.resize_token_embeddings(20)
    with pytest.raises(ModelError, match="only those below 20"):
        refuse_out_of_reach(small, tiny_tokenizer(), max_length=40)


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_models_route_nothing(family: str) -> None:
    assert not routes_tokens(tiny_model(family))


@pytest.mark.parametrize(
    "config",
    [
        hf.MixtralConfig(num_local_experts=4),
        hf.OlmoeConfig(num_experts=4),
        hf.DeepseekV3Config(n_routed_experts=4),
        hf.DbrxConfig(ffn_config={"moe_num_experts": 4}),  # within a part of the config
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_mixture_of_experts_is_known_by_its_config(config: Any) -> None:
    model = torch.nn.Linear(2, 2)
    model.config = config
    assert routes_tokens(model)


@pytest.mark.parametrize("name", ["TopKRouter", "SparseMoeBlock", "MyMoE", "DbrxExperts"])
def test_a_mixture_of_experts_is_known_by_its_modules(name: str) -> None:
    assert not routes_tokens(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert routes_tokens(torch.nn.Sequential(type(name, (torch.nn.Linear,), {})(2, 2)))


def example(*ids: int) -> Example:
    tokens = np.array(ids, dtype=np.int32)
    return Example(tokens, tokens)


def examples(*given: Example) -> Examples:
    return Examples(given, pad_token_id=0)


def test_float16_anywhere() -> None:
    refuse_float16(tiny_model(dtype=torch.bfloat16))
    model = tiny_model()
    model.model.norm.half()
    with pytest.raises(ModelError, match="float16"):
        refuse_float16(model)


class _LeaksBackwards(torch.autograd.Function):
    """The identity, whose backward pass hands a tenth of each row's gradient to the row above it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, e: torch.Tensor) -> torch.Tensor:
        return e + 0.1 * e.roll(-1, dims=0)


def attending(name: str, change: Any) -> Any:
    """A model with an attention of its own, which hands its output of SDPA to ``change``."""

    def attend(module: Any, *args: Any, **options: Any) -> Any:
        out, weights = hf.AttentionInterface._global_mapping["sdpa"](module, *args, **options)
        return change(out), weights

    hf.AttentionInterface.register(name, attend)
    hf.AttentionMaskInterface.register(name, hf.AttentionMaskInterface._global_mapping["sdpa"])
    model = hf.AutoModelForCausalLM.from_config(FAMILIES["llama"](), attn_implementation=name)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_that_reaches_into_other_rows_is_refused(dtype: torch.dtype) -> None:
    probe(attending("tested_well", lambda out: out).to(dtype))
    with pytest.raises(ModelError, match="a record's logits depend on the records beside it"):
        probe(attending("tested_forwards", lambda out: out + 0.5 * out.roll(1, dims=0)).to(dtype))


def test_attention_whose_backward_pass_alone_reaches_into_other_rows_is_refused() -> None:
    with pytest.raises(ModelError, match=r"gradient of a record's loss reaches.*model\.attn_implementation"):
        probe(attending("tested_backwards", _LeaksBackwards.apply))
    with pytest.raises(ModelError, match="reaches the records beside it"):
        probe(altered(_LeaksBackwards.apply))


@pytest.mark.parametrize("name", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
def test_attention_is_computed_as_asked(family: str, name: str, tmp_path: Any) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, _ = load_model(ModelSettings(name=str(tmp_path), device="cpu", attn_implementation=name))
    assert model.config._attn_implementation == name
    probe(model)


def test_a_token_beyond_the_model_is_refused_before_a_run_has_a_folder(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    tokenizer = hf.AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["zzqq"])
    tokenizer.save_pretrained(model)
    records = tmp_path / "records.jsonl"
    records.write_text(
        "".join(f'{{"text": "a note {number}"}}\n' for number in range(19)) + '{"text": "zzqq"}\n'
    )
    with pytest.raises(DataError, match="a token that the model does not know"):
        fine_tune(model, records, privacy=PRIVACY, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
