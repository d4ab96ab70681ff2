"""The dry run: its numbers, and that it reads no record."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_cases import LOADING, Call, refuses, run_settings, write_config, write_records
from scipy.stats import binom
from transformers import AutoModelForCausalLM

from privlora.accounting import PoissonSampling, StepEvent, epsilon
from privlora.methods import RATE_STEPS
from privlora.rehearsals import trials
from privlora.rehearsals.trials import Noise, Texts
from privlora.rounding import rounded_up
from privlora.training.assembly import Parts
from privlora.training.fitting import Peak, StepMemory

BEGUN = [LOADING]
"""What a plan says in pipes before what takes long."""


@pytest.fixture(autouse=True)
def a_quick_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is printed is known."""
    found = Peak(step_bytes=5 * 2**20, model_bytes=2 * 2**20, rows=3, width=4)
    monkeypatch.setattr(StepMemory, "peak", lambda *_: found)


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Path:
    """A run of eight steps whose records do not exist."""
    return write_config(tmp_path, run_settings(model, tmp_path, privacy={"steps": 8}, adapter={"r": 3}))


def linear_layers(model: Path) -> list[torch.nn.Linear]:
    """Those that are adapted."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    return [m for n, m in loaded.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]


def test_epsilon_over_the_run(config: Path, call: Call) -> None:
    found = call("plan", config, "--json").json
    event = StepEvent(PoissonSampling(0.1), 2.0)
    assert [point["step"] for point in found["cost"]["over_steps"]] == [2, 4, 6, 8]
    for point in found["cost"]["over_steps"]:
        assert point["epsilon"] == epsilon([(event, point["step"])], 1e-3)
    replace_one = epsilon([(event, 8)], 1e-3, adjacency="replace-one")
    assert found["cost"]["epsilon_replace_one"] == replace_one
    assert found["noise_to_batch"] == 0.5
    assert found["probability_above_cap"] is None
    assert "cross_check" not in found["cost"]
    assert not (config.parent / "records.jsonl").exists()
    assert not (config.parent / "run").exists()


def test_a_plan_is_a_screen_for_a_person(config: Path, call: Call) -> None:
    """What is decided by; all else with --verbose."""
    shown = call("plan", config).out
    assert len(shown.splitlines()) <= 14  # the records are not there, which takes two
    spent = rounded_up(call("plan", config, "--json").json["cost"]["epsilon"])
    assert f"promise     epsilon {spent} at delta 0.001, for each record\n" in shown
    assert "\nnot protected: " in shown
    whole = call("plan", config, "--verbose").out
    assert len(whole.splitlines()) > 2 * len(shown.splitlines())


def test_many_steps_take_a_while_and_more_than_can_be_counted_are_refused(config: Path, call: Call) -> None:
    told = call("plan", config, "--verbose", "privacy.steps=5000").err.splitlines()
    assert "finding the noise of 5000 steps" in told
    refused = call("plan", config, "--verbose", "privacy.steps=1000000000")
    assert refused.code == 2
    assert "1000000000 steps are more than 1000000: the noise" in refused.err


def test_a_quantile_is_in_the_same_epsilon(config: Path, call: Call) -> None:
    plain = call("plan", config, "--json").json
    found = call("plan", config, "--verbose", "privacy.clip_quantile=0.5", "--json").json
    assert found["cost"] == plain["cost"]
    assert found["noise_to_batch"] == pytest.approx(0.5 * 0.99**-0.5)
    assert "0.5 of the norms" in call("plan", config, "--verbose", "privacy.clip_quantile=0.5").out


def test_other_accountants_on_request(config: Path, call: Call) -> None:
    pytest.importorskip("prv_accountant", reason="of the extra prv")
    cost = call("plan", config, "--verbose", "--cross-check", "--json").json["cost"]
    assert cost["cross_check"]["rdp"]["epsilon"] > cost["epsilon"]
    assert cost["cross_check"]["prv"]["epsilon"] == pytest.approx(cost["epsilon"], abs=0.02)


def test_a_cap(config: Path, call: Call) -> None:
    overrides = ["privacy.max_batch_size=7", "privacy.noise_multiplier=4"]
    found = call("plan", config, "--verbose", *overrides, "--cross-check", "--json").json
    assert found["probability_above_cap"] == pytest.approx(binom.sf(7, 40, 0.1))
    for opinion in found["cost"]["cross_check"].values():
        assert opinion["epsilon"] is None
        assert "truncated" in opinion["reason"]
    assert any("cap" in sentence for sentence in found["not_protected"])


def test_bands(config: Path, call: Call) -> None:
    """Batches of one class in turn, the price of cycles, and what is kept."""
    found = call("plan", config, "--verbose", "privacy.bands=3", "--json").json
    cycles = StepEvent(PoissonSampling(found["rate_of_a_class"]), 2.0)
    assert found["rate_of_a_class"] == pytest.approx(0.3)
    assert found["cost"]["epsilon"] == epsilon([(cycles, 3)], 1e-3)
    assert found["largest_row"] > 1 > found["noise_in_sums"]
    assert found["noise_in_sums_at_equal_epsilon"] is None
    grown = found["default_rate"] / call("plan", config, "--json").json["default_rate"]
    assert grown == pytest.approx(found["noise_in_sums"] ** -1.5, rel=1e-2)
    assert found["hyperparameters"]["learning_rate"] == found["default_rate"]
    assert "bands" not in call("plan", config, "--json").json
    refused = call("plan", config, "--verbose", "privacy.bands=auto")
    assert "target_epsilon, which is missing" in refused.err


def test_memory_is_that_of_the_model(config: Path, model: Path, call: Call) -> None:
    memory = call("plan", config, "--json").json["memory"]
    loaded, layers = AutoModelForCausalLM.from_pretrained(model), linear_layers(model)
    sides = [module.in_features + module.out_features for module in layers]
    assert memory["modules"] == len(layers)
    assert memory["model_parameters"] == sum(p.numel() for p in loaded.parameters())
    assert memory["weight_bytes"] == 4 * memory["model_parameters"]
    assert memory["trained_numbers"] == sum(3 * (both - 3) for both in sides)
    assert memory["gradient_bytes_per_record"] == 4 * 3 * sum(sides)
    many = ["privacy.public_dataset_size=40000", "privacy.expected_batch_size=4000", "privacy.delta=1e-6"]
    assert (
        call("plan", config, "--verbose", *many, "--json").json["memory"]["records_per_micro_batch"]
        == 4096 // 48
    )


def test_gradients_of_short_records(config: Path, call: Call) -> None:
    """A row's gradients take what the activations of r = 3 tokens take, and shorter ones count as that long."""
    many = ["privacy.public_dataset_size=40000", "privacy.expected_batch_size=4000", "privacy.delta=1e-6"]
    memory = call("plan", config, "--verbose", *many, "--json").json["memory"]
    assert memory["records_of_a_batch"] > 4000
    assert memory["gradient_bytes_at_most"] == memory["gradient_bytes_per_record"] * (4096 // 3)


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        ([], int(binom.isf(1e-9, 40, 0.1))),
        (["privacy.max_batch_size=7", "privacy.noise_multiplier=4"], 7),
        (["privacy.unit=user", "privacy.user_column=who", "privacy.max_records_per_user=3"], None),
    ],
    ids=["poisson", "truncated", "users"],
)
def test_no_micro_batch_has_more_records_than_a_batch(
    overrides: list[str], most: int | None, config: Path, call: Call
) -> None:
    most = most or 3 * int(binom.isf(1e-9, 40, 0.1))
    given = [*overrides, "run.tokens_per_micro_batch=1000000000"]
    memory = call("plan", config, "--verbose", *given, "--json").json["memory"]
    assert memory["records_per_micro_batch"] == memory["records_of_a_batch"] == most
    assert (
        memory["gradient_bytes"]
        == memory["gradient_bytes_at_most"]
        == most * memory["gradient_bytes_per_record"]
    )


MISSING = {
    "a kernel": (
        "model.attn_implementation=flash_attention_2",
        "cannot have attn_implementation=flash_attention_2",
    ),
    "a backward pass": ("model.attn_implementation=flex_attention", "flex_attention does not train here"),
    "a device": ("model.device=cuda:77", "'cuda:77' is not available here"),
    "packed weights spread": ("model.quantization=4bit", "packed weights are not taken apart"),
    "a rate that one process finds": ("method.learning_rate=auto", "what is auto is found by one process"),
}
SPREAD = ("packed weights spread", "a rate that one process finds")
"""Which several processes refuse."""


@pytest.mark.parametrize("name", MISSING)
def test_what_training_refuses_on_this_machine_is_told_and_the_plan_goes_on(
    name: str, config: Path, call: Call
) -> None:
    override, words = MISSING[name]
    if "quantization" in override:
        pytest.importorskip("bitsandbytes", reason="of the extra quant")
    given = [override, *(["model.fully_shard=true"] if name in SPREAD else ["model.device=cpu"])]
    if "device=" in override:
        given = [override]
    write_records(config.parent / "records.jsonl")
    planned = call("plan", config, "--verbose", *given)
    assert (planned.code, planned.err.splitlines()) == (0, BEGUN)
    assert planned.out.splitlines()[-2] == "`privlora train` is refused on this machine:"
    assert words in planned.out.splitlines()[-1]
    (found,) = call("plan", config, "--verbose", *given, "--json").json["refused_here"]
    assert words in found
    if name not in SPREAD:
        refuses(
            call,
            config.parent,
            ["train", config, *given],
            found.split(": ")[-2].partition(" ")[2],
            quiet=False,
        )
    assert call("plan", config, "--json").json["refused_here"] == []


def test_missing_records_are_told_and_the_plan_goes_on(config: Path, call: Call) -> None:
    (found,) = call("plan", config, "--json").json["refused_here"]
    assert found.startswith("data.path (line ")
    assert "there is no file " in found


def test_packed_weights_without_their_package(
    config: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privlora.training.models.find_spec", lambda name: None)
    found = call("plan", config, "--verbose", "model.quantization=4bit", "--json").json
    assert "needs the package bitsandbytes" in found["refused_here"][0]
    assert found["model"]["quantization"] == "4bit"


def test_the_peak_is_that_of_the_settings(config: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    peak, asked = Peak(500, 70, 3, 4), list[object]()

    def watched(memory: StepMemory, tokens: int) -> Peak:
        model = memory.adapter.model
        asked.append([memory.adapter.rank, model.dtype, model.config._attn_implementation, tokens])
        return peak

    monkeypatch.setattr(StepMemory, "peak", watched)
    given = ["run.tokens_per_micro_batch=100", "model.dtype=bfloat16", "model.device=cpu"]
    memory = call("plan", config, "--verbose", *given, "--json").json["memory"]
    call("plan", config, "--verbose", *given, "model.attn_implementation=eager")
    assert asked == [[3, torch.bfloat16, kind, 100] for kind in ("sdpa", "eager")]
    assert memory["peak"] == {"step_bytes": 500, "model_bytes": 70, "rows": 3, "width": 4}
    assert memory["device"] == "cpu"


def test_what_auto_would_choose_here(config: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepMemory, "peak", lambda _, tokens: Peak(tokens * 2**20, 0, 1, tokens))
    monkeypatch.setattr("privlora.training.fitting.free_bytes", lambda _: 300 * 2**20)
    given = ["run.tokens_per_micro_batch=auto"]
    found = call("plan", config, "--verbose", *given, "--json").json
    assert found["tokens_per_micro_batch"] == 128  # 0.45 of 300 MiB, less the model and the records
    shown = call("plan", config, "--verbose", *given).out
    assert "auto        micro-batches of 128 tokens: a step takes at most about 128 MiB of " in shown
    assert " MiB that it may use; larger ones do not fit\n" in shown
    assert call("plan", config, "--json").json["tokens_per_micro_batch"] == 4096


def test_the_peak_is_printed(config: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privlora.cli.memory.resident_bytes", lambda: 300 * 2**20)
    shown = call("plan", config, "--verbose", "model.device=cpu").out
    assert "about 307 MiB (model 2 MiB, step 5 MiB, Python and its packages 300 MiB)" in shown
    assert call("plan", config, "--json").json["memory"]["resident_bytes"] == 300 * 2**20


def test_each_space_trains_its_own_numbers(config: Path, model: Path, call: Call) -> None:
    tangent, factors, one = (
        call("plan", config, f"method.name={name}", "--json").json["memory"]
        for name in ("prism", "dp-adamw", "ffa")
    )
    assert factors["trained_numbers"] - tangent["trained_numbers"] == 9 * tangent["modules"]
    assert one["trained_numbers"] == sum(3 * m.out_features for m in linear_layers(model))


def test_privacy_is_told_before_memory(
    config: Path, call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    monkeypatch.setattr("privlora.cli.memory.resident_bytes", lambda: 300 * 2**20)  # grows from call to call

    def measured(*_: object) -> None:
        told.append(capsys.readouterr().out)

    whole = call("plan", config, "--verbose").out
    monkeypatch.setattr("privlora.cli.memory.as_planned", lambda settings, _: (measured() or settings, None))
    rest = call("plan", config, "--verbose").out
    assert told[0].startswith("promise ")
    assert "\nepsilon " in told[0]
    assert "memory" not in told[0]
    assert "memory      " in rest
    assert told[0] + rest == whole


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that could be asked, and is not."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])


@pytest.mark.usefixtures("reachable")
def test_a_model_of_the_hub_is_not_fetched(config: Path, call: Call) -> None:
    planned = call("plan", config, "--verbose", "model.name=no-such-org/no-such-model")
    assert planned.code == 0, planned.err
    assert "unknown: the model is not a local folder" in planned.out


def test_an_alpha_without_effect_is_told(config: Path, call: Call) -> None:
    said, alpha = "has no effect on what prism learns", "adapter.lora_alpha=32"
    assert said in call("plan", config, "--verbose", alpha).out
    assert said not in call("plan", config, "--verbose").out
    assert said not in call("plan", config, "--verbose", alpha, "method.name=dp-adamw").out


def test_without_privacy_nothing_is_promised(config: Path, call: Call) -> None:
    overrides = ["privacy.private=false", "privacy.noise_multiplier=null", "method.name=adamw"]
    assert "NOT PRIVATE" in call("plan", config, "--verbose", *overrides).out
    found = call("plan", config, "--verbose", *overrides, "--json").json
    assert found["private"] is False
    assert found["cost"] is None
    seeded = call("plan", config, "--verbose", "privacy.insecure_noise_seed=3", "--json").json
    assert seeded["private"] is False
    assert seeded["cost"] is None


def test_a_projection_that_is_clipped_before(config: Path, model: Path, call: Call) -> None:
    found = call("plan", config, "--verbose", "method.name=wishart-m2", "--json").json
    linear = linear_layers(model)
    layers = tuple((3, n) for n in sorted({m.in_features for m in linear}))
    event = StepEvent(PoissonSampling(0.1), 2.0, layers)
    assert found["cost"]["epsilon"] == epsilon([(event, 8)], 1e-3)
    plain = call("plan", config, "--verbose", "method.name=projected", "--json").json
    assert found["cost"]["epsilon"] < plain["cost"]["epsilon"]
    assert found["cost"]["epsilon_replace_one"] is None
    assert any("replaced by another" in sentence for sentence in found["not_protected"])
    numbers = sum(m.weight.numel() for m in linear)
    assert found["memory"]["update_bytes"] == plain["memory"]["update_bytes"] == numbers * 8


@pytest.fixture
def choosing(model: Path, tmp_path: Path) -> Path:
    write_records(tmp_path / "public.jsonl", 40, first=100)
    synthesis = {"file": str(tmp_path / "public.jsonl"), "seeds": 6}
    given = run_settings(
        model,
        tmp_path,
        privacy={"steps": 1},
        adapter={"target_modules": ["q_proj"]},
        method={"name": "dp-adamw", "learning_rate": 0.01},
        synthesis=synthesis,
    )
    return write_config(tmp_path, given)


def test_advice_says_from_how_many_records_on(
    choosing: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(parts: Parts, texts: Texts, noise: Noise, draw: int, tick: Callable[[], None]) -> torch.Tensor:
        for _ in range(noise.privacy.steps):
            tick()
        few = noise.records < 200
        return torch.full((len(texts.held),), 1.0 + (few == (parts.method.name == "prism")))

    monkeypatch.setattr(trials, "_held_losses", losses)
    advice = call("plan", choosing, "--advise", "--json").json["advice"]
    assert [line["records"] for line in advice["table"]] == [40, 50, 100, 200, 400]  # 1600 is above 1 / delta
    assert [line["rows"][0]["name"] for line in advice["table"]] == ["guided-prism"] * 3 + ["prism"] * 2
    assert advice["overtakes"] == 200
    shown = call("plan", choosing, "--advise")
    said = "prism with clipping: automatic overtakes guided-prism and span-prism at 200 records"
    assert said in " ".join(shown.out.split())
    assert re.search(r"rehearsing on public texts: (\d+) of \1\n", shown.err)


def test_no_advice_without_public_texts(config: Path, call: Call) -> None:
    words = "an advice needs public texts to rehearse on"
    refuses(call, config.parent, ["plan", config, "--advise"], words, said=[LOADING])


PUBLIC_TROUBLE = {
    "a file that is not there": (["synthesis.file=/no/such.jsonl"], "synthesis.file (on the command line): "),
    "too few texts": (
        ["synthesis.seeds=20", "synthesis.variations=0", "synthesis.evolution=none"],
        "has 12 different texts that are not used yet, and 20 are needed",
    ),
    "no evaluation records": (["data.evaluation=/no/such.jsonl"], "data.evaluation (on the command line): "),
}


@pytest.mark.parametrize("name", PUBLIC_TROUBLE)
def test_public_texts_that_training_refuses_are_refused(
    name: str, model: Path, folder: Path, call: Call
) -> None:
    """In the words of `privlora train`, whose own refusals have tests of their own; before anything is loaded."""
    overrides, words = PUBLIC_TROUBLE[name]
    public = write_records(folder / "public.jsonl", 12, first=200)
    texts = {"file": str(public), "seeds": 3, "variations": 0}
    given = run_settings(model, folder, privacy={"steps": 8}, method={"name": "span-prism"}, synthesis=texts)
    config = write_config(folder, given)
    assert call("plan", config, "--verbose").code == 0
    said = [] if overrides[0].endswith("/no/such.jsonl") else [LOADING]
    refuses(call, folder, ["plan", config, *overrides], words, said=said)


def test_texts_that_are_only_released_or_rehearsed_on_are_no_trouble(choosing: Path, call: Call) -> None:
    """`privlora synthesize` makes texts a release, whatever the row; an advice rehearses on them."""
    released = ["method.name=prism", "synthesis.file=null"]
    assert call("plan", choosing, *released).code == 0
    given = ["plan", choosing, "method.name=prism"]
    refuses(call, choosing.parent, given, "synthesis.file asks another writer", said=[LOADING])


def test_a_row_of_public_texts_without_any_is_refused(config: Path, call: Call) -> None:
    words = "public texts, and none are given"
    refuses(call, config.parent, ["plan", config, "method.name=pe-sgd"], words, said=[LOADING])


@pytest.mark.parametrize("command", ["plan", "train"])
def test_more_directions_than_texts_are_refused(command: str, choosing: Path, call: Call) -> None:
    write_records(choosing.parent / "records.jsonl")
    given = [command, choosing, "method.name=pe-sgd", "synthesis.variations=0"]
    words = "method.top_k=7 is more than the 6 public texts that synthesis.seeds=6 "
    asked = [*given, "method.top_k=7"]
    refuses(call, choosing.parent, asked, words, quiet=command == "plan", said=[LOADING])


def test_memory_of_rows_on_public_texts(choosing: Path, model: Path, call: Call) -> None:
    """N gradients of public texts as a vector holds them, and no more of private ones than go beside them."""
    given = [choosing, "adapter.r=3", "adapter.target_modules=[q_proj]"]
    layers = [
        m
        for name, m in AutoModelForCausalLM.from_pretrained(model).named_modules()
        if name.endswith("q_proj")
    ]
    sides = [m.in_features + m.out_features for m in layers]
    for row, entries in (
        ("pe-sgd", sum(3 * s for s in sides)),
        ("span-prism", sum(3 * (s + 3) for s in sides)),
    ):
        memory = call("plan", *given, f"method.name={row}", "--json").json["memory"]
        assert memory["public_bytes"] == 12 * entries * 4
        captured = sum(3 * s for s in sides)
        copies = 1 if row == "pe-sgd" else 2  # as captured, and end to end
        assert memory["gradient_bytes_per_record"] == 4 * (captured + (copies - 1) * entries)
        assert memory["records_per_micro_batch"] == memory["records_of_a_batch"] < 4096 // 48
        assert memory["embedding_bytes"] == memory["cache_bytes"] == 0


def test_few_units_go_beside_few_public_gradients(
    choosing: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privlora.coordinates.span._BYTES", 2**14)
    found = call("plan", choosing, "method.name=pe-sgd", "--json").json
    memory = found["memory"]
    assert 0 < memory["records_per_micro_batch"] < 4096 // 48
    assert memory["gradient_bytes"] <= 2**14


def test_memory_of_votes(choosing: Path, model: Path, call: Call) -> None:
    """No record's gradient is taken; directions are kept, and the model writes with a cache of keys and values."""
    given = [choosing, "synthesis.file=null"]
    given += ["method.name=aug-pe", "method.learning_rate=0.01"]
    memory = call("plan", *given, "--json").json["memory"]
    assert memory["gradient_bytes"] == memory["public_bytes"] == memory["gradient_bytes_per_record"] == 0
    config = AutoModelForCausalLM.from_pretrained(model).config
    assert memory["embedding_bytes"] == (40 + 12) * config.hidden_size * 8
    width = config.hidden_size // config.num_attention_heads
    assert (
        memory["cache_bytes"] == 2 * config.num_hidden_layers * config.num_key_value_heads * width * 4096 * 4
    )


@pytest.mark.parametrize(
    ("row", "rate", "says"),
    [
        ("dp-zo", 3e-3, "30 times the method's default"),
        ("dp-zo", 8e-4, "8 times the method's default"),
        ("dp-zo", 7.5e-4, None),
        ("dp-sgd", 5e-4, "1/8 of the method's default"),
        ("dp-sgd", 0.02, None),
        ("dp-zo", None, None),
    ],
)
def test_a_rate_far_from_the_rows_own_is_told(
    row: str, rate: float | None, says: str | None, config: Path, call: Call
) -> None:
    given = ["method.learning_rate=null" if rate is None else f"method.learning_rate={rate}"]
    steps = f"privacy.steps={RATE_STEPS}"  # of which a row's rate is
    shown = call("plan", config, "--verbose", f"method.name={row}", steps, *given).out
    lines = [line for line in shown.splitlines() if line.startswith("rate ")]
    assert len(lines) == (says is not None)
    assert says is None or says in lines[0]
