"""A GGUF file as a base: the same model as the safetensors it was made from, or as its decoded weights."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file
from support import FIXTURES
from support.cli import flags
from support.gguf_files import DEMO, demo_tokenizer, random_model, tensors_of, write_gguf
from support.gguf_models import make_model
from support.models import ARCHITECTURES, full_logits, golden, golden_rows
from support.sampling import sample

from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.gguf_checkpoint import GGUFCheckpoint
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.architectures import ARCHITECTURES as REGISTERED
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.models.model_files import read_model

MODELS = FIXTURES / "models"


def windowless(architecture: str, directory: Path) -> Path:
    """A fixture without its sliding windows, which llama.cpp's converter does not write, and with positions in the
    layers that llama.cpp gives them."""
    directory.mkdir()
    for path in (MODELS / architecture).iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    if "gemma" in architecture:  # whose windows are always written, with the usual scale of scores and a tied head
        config |= {"query_pre_attn_scalar": config["head_dim"], "tie_word_embeddings": True}
        weights = load_file(directory / "model.safetensors")
        weights.pop("lm_head.weight", None)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        config |= {"sliding_window": None, "use_sliding_window": False}
    for name in ("layer_types", "no_rope_layers", "no_rope_layer_interval"):
        if "qwen3_5" not in architecture:
            config.pop(name, None)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def quantized(kind: Kind, seed: int = 0):
    """Any bytes are some matrix; scales of 16 bits are made small and finite."""
    rng = np.random.default_rng(seed)

    def of(name: str, values: np.ndarray) -> tuple[np.ndarray, Kind]:
        if values.ndim == 1:
            return values.astype(np.float32), Kind.F32
        if kind in (Kind.Q8_0, Kind.Q4_0):
            return gguf.quants.quantize(values, kind), kind
        block, nbytes = GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 256, (len(values), values.shape[1] // block, nbytes)).astype(np.uint8)
        data[..., 1::2] &= 0x1F  # no 16 bits of a half's exponent are all set
        return data.reshape(len(values), -1), kind

    return of


def logits(model: LoadedModel, ids: list[np.ndarray]) -> list[np.ndarray]:
    model.load_weights()
    return full_logits(model, [Segment(row) for row in ids])


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if REGISTERED[name].GGUF and name != "gemma3"])
def test_logits_are_those_of_the_safetensors(device: Device, tmp_path: Path, architecture: str) -> None:
    source = windowless(architecture, tmp_path / "source")
    file = write_gguf(source, tmp_path / "model.gguf")
    rows = golden_rows(golden(architecture), "input_ids")
    for base in ("f32", "nf4"):
        expected = logits(open_model(str(source), device, base), rows)
        for have, want in zip(logits(open_model(str(file), device, base), rows), expected, strict=True):
            np.testing.assert_allclose(have, want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_half_precision_stays_as_it_is(tmp_path: Path, kind: Kind) -> None:
    checkpoint = read_model(write_gguf(MODELS / "llama", tmp_path / "model.gguf", kind)).checkpoint
    originals = tensors_of(MODELS / "llama")
    for name in checkpoint.names():
        values = originals[name]
        assert checkpoint.dtype(name) == ("F32" if values.ndim == 1 else kind.name)
        if values.ndim == 2:
            halves = values.astype(np.float16 if kind == Kind.F16 else "bfloat16")
            np.testing.assert_array_equal(checkpoint.read_raw(name), halves.view(np.uint16))
            np.testing.assert_array_equal(checkpoint.read_f32(name), halves.astype(np.float32))
    # the original's bits and only these: neither architecture nor metadata are touched by the rows' order
    assert checkpoint.digest() != read_model(write_gguf(MODELS / "llama", tmp_path / "other.gguf")).checkpoint.digest()


KINDS = [kind for kind in Kind if GGML_QUANT_SIZES.get(kind, (1, 0))[0] > 1 and kind.name not in ("Q8_1", "Q8_K")]


@pytest.mark.parametrize("kind", sample([*KINDS], 1 / 2), ids=lambda kind: kind.name)
def test_every_quantisation_is_decoded_by_rows(tmp_path: Path, kind: Kind) -> None:
    source = random_model(tmp_path / "source")
    file = write_gguf(source, tmp_path / "model.gguf", quantize=quantized(kind))
    try:
        gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        with pytest.raises(UserError, match=f"stored as {kind.name}, which cannot be decoded"):
            read_model(file)
        return
    files = read_model(file)
    stated = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for theirs, name in (("blk.0.ffn_down.weight", "mlp.down_proj"), ("blk.0.attn_k.weight", "self_attn.k_proj")):
        with np.errstate(all="ignore"):
            whole = gguf.quants.dequantize(stated[theirs].data, kind)
        if "attn" in theirs:  # halves of each head, from neighbours
            whole = whole.reshape(2, 32, 2, 256).swapaxes(1, 2).reshape(whole.shape)
        name = f"model.layers.0.{name}.weight"
        assert files.checkpoint.dtype(name) == "F32"
        for rows in ((0, len(whole)), (0, 1), (63, 66), (70, 70), (5, 123)):
            np.testing.assert_array_equal(files.checkpoint.read_f32(name, *rows), whole[slice(*rows)])
            np.testing.assert_array_equal(files.checkpoint.read_raw(name, *rows).view(np.float32), whole[slice(*rows)])


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q6_K, Kind.Q4_K, Kind.Q2_K])
def test_the_model_is_that_of_the_decoded_weights(device: Device, tmp_path: Path, kind: Kind) -> None:
    """Logits are those of a checkpoint of decoded weights, for every base, NF4 included; only f32 keeps tables so."""
    source = random_model(tmp_path / "source")
    file = write_gguf(source, tmp_path / "model.gguf", quantize=quantized(kind))
    checkpoint = read_model(file).checkpoint
    decoded = random_model(tmp_path / "decoded")
    names = checkpoint.names()
    tensors = {name: checkpoint.read_f32(name) for name in names}
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    halves = {name: tensors[name].astype(np.float16) for name in tables}
    rows = [np.arange(1, 14), np.arange(200, 210)]
    for base in ("nf4", "f32", "bf16"):
        save_file(tensors if base == "f32" else tensors | halves, decoded / "model.safetensors")
        actual, expected = open_model(str(file), device, base), open_model(str(decoded), device, base)
        for have, want in zip(logits(actual, rows), logits(expected, rows), strict=True):
            np.testing.assert_array_equal(have, want)

    # By default, matrices keep their types, whose values are exact.
    model = open_model(str(file), device)
    assert model.decoder.base_dtype == "gguf"
    if not model.notes:  # else it has types that are rounded again
        save_file(tensors, decoded / "model.safetensors")
    expected = logits(open_model(str(decoded), device, "nf4" if model.notes else "f32"), rows)
    for have, want in zip(logits(model, rows), expected, strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=2e-6 * np.abs(want).max())
    for name, weight in model.decoder.matrices():
        if not model.notes:
            np.testing.assert_array_equal(weight.values(device), tensors[name])


def test_what_is_rounded_again_is_said(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By type and target; and by module, where others keep the type."""
    kinds = {"token_embd": Kind.Q2_K, "attn_q": Kind.Q3_K}

    def of(name: str, values: np.ndarray) -> tuple[np.ndarray, Kind]:
        return quantized(kinds.get(name.removeprefix("blk.0.").removesuffix(".weight"), Kind.Q8_0))(name, values)

    file = write_gguf(random_model(tmp_path / "source"), tmp_path / "model.gguf", quantize=of)
    again = "which costs accuracy: use a file with other types, such as Q8_0"
    assert open_model(str(file), device).rounding == [
        "the embedding or LM head in Q2_K is rounded to f16",
        f"the weights in Q3_K are rounded again, to nf4, {again}",
    ]
    assert len(open_model(str(file), device, "int8").rounding) == 1
    assert not open_model(str(file), device, "f32").rounding

    def wide(name: str, values: np.ndarray) -> tuple[np.ndarray, Kind]:
        plain = values.ndim == 1 or values.shape[1] % 256 or "conv" in name
        return (values, Kind.F32) if plain else quantized(Kind.Q4_K)(name, values)

    heads = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 64, "value_head_dim": 64, "conv_kernel_dim": 4}
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    stated = {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 128, "rope_parameters": rope}
    stated |= {"tie_word_embeddings": True, **{f"linear_{name}": value for name, value in heads.items()}}
    source = make_model(tmp_path / "qwen35", stated)
    file = write_gguf(source, tmp_path / "qwen35.gguf", quantize=wide, tokenizer=demo_tokenizer)
    (note,) = open_model(str(file), device).rounding
    assert note == f"the weights in Q4_K of out_proj are rounded again, to nf4, {again}"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    assert main(["evaluate", *flags(model=file, data=tmp_path / "rows.jsonl")]) == 0
    assert note in " ".join(capsys.readouterr().out.split())
    assert main(["generate", *flags(model=file, prompt="a", max_new_tokens=1)]) == 0
    assert note in capsys.readouterr().err
    taught = {"model": file, "teacher": file, "teacher_base_dtype": "nf4", "objective": "kd", "max_steps": 1}
    assert main(["plan", *flags(**taught, data=tmp_path / "rows.jsonl")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "of the teacher, the weights in Q4_K are rounded again, to nf4" in shown
    assert "leave out --teacher-base-dtype nf4" in shown


def test_a_vector_that_is_quantised(tmp_path: Path) -> None:
    source = random_model(tmp_path / "source")

    def of(name: str, values: np.ndarray) -> tuple[np.ndarray, Kind]:
        return gguf.quants.quantize(values, Kind.Q8_0), Kind.Q8_0

    file = write_gguf(source, tmp_path / "model.gguf", quantize=of)
    with pytest.raises(
        UserError, match=r"norm\.weight in .* is a vector stored as Q8_0, expected F32, F16 or BF16: use"
    ):
        read_model(file)


def test_a_shape_has_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "list", "--base-dtype", "gguf"]) == 2
    assert "give one as --model, or a single type such as q8_0 for a shape" in capsys.readouterr().err


def test_tables_beyond_f16_are_refused(tmp_path: Path) -> None:
    source = random_model(tmp_path / "source")
    tensors = tensors_of(source)
    tensors["model.embed_tokens.weight"][7, 7] = 1e5
    save_file(tensors, source / "model.safetensors")
    checkpoint = read_model(write_gguf(source, tmp_path / "model.gguf", Kind.Q8_0)).checkpoint
    assert checkpoint.dtype("model.embed_tokens.weight") == "F16"
    checkpoint.read_raw("model.embed_tokens.weight", 8, 300)
    with pytest.raises(UserError, match="beyond F16's range"):
        checkpoint.read_raw("model.embed_tokens.weight")


def demo_file(path: Path) -> Path:
    return write_gguf(DEMO, path, Kind.Q8_0, tokenizer=demo_tokenizer)


def test_training_and_resuming_through_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = demo_file(tmp_path / "demo-q8_0.gguf"), tmp_path / "run"
    row = {"prompt": "What colour is grass?", "completion": "Green."}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    options = {"model": file, "data": tmp_path / "rows.jsonl", "output": run, "max_length": 64, "max_steps": 3}
    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "lora_r": 4, "save_steps": 2}
    options |= {"logging_steps": 1, "learning_rate": 1e-2}
    assert main(["finetune", *flags(**options)]) == 0
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[-1] < losses[0]
    assert json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"] == str(file)
    assert main(["generate", *flags(adapter=run, prompt=row["prompt"], max_new_tokens=4)]) == 0
    assert main(["finetune", *flags(**options, resume=True)]) == 0
    write_gguf(DEMO, file, Kind.Q4_0, tokenizer=demo_tokenizer)  # other weights behind the same name
    assert main(["finetune", *flags(**options, resume=True)]) == 2
    assert "has changed since the run in" in capsys.readouterr().err


def test_a_directory_of_gguf_files_is_no_model(tmp_path: Path) -> None:
    demo_file(tmp_path / "demo.gguf")
    with pytest.raises(UserError, match="holds GGUF files: give the path of one"):
        read_model(tmp_path)


def test_the_files_are_not_mapped(tmp_path: Path) -> None:
    """A file that becomes shorter while it is read is a sentence, not a signal."""
    file = write_gguf(random_model(tmp_path / "source"), tmp_path / "model.gguf")
    checkpoint = read_model(file).checkpoint
    assert isinstance(checkpoint, GGUFCheckpoint)
    with file.open("rb+") as opened:
        opened.truncate(file.stat().st_size // 2)
    with pytest.raises(UserError, match="ended while"):
        list(map(checkpoint.read_f32, checkpoint.names()))


def test_importing(device: Device, tmp_path: Path) -> None:
    """A directory of NF4 that is the same model, tokenizer and all."""
    file, output = demo_file(tmp_path / "demo.gguf"), tmp_path / "packed"
    assert main(["import", str(file), "--output", str(output)]) == 0
    actual, expected = open_model(str(output), device), open_model(str(file), device, "nf4")
    rows = [np.arange(5, 18)]
    np.testing.assert_array_equal(logits(actual, rows), logits(expected, rows))
    messages = [{"role": "user", "content": "What's 12 + 34?"}]
    texts = [model.tokenizer.render(messages) for model in (actual, expected)]
    assert texts[0] == texts[1]
    assert actual.tokenizer.encode(texts[0]) == expected.tokenizer.encode(texts[0])
    assert actual.tokenizer.stop_ids == expected.tokenizer.stop_ids


@pytest.mark.parametrize(("original", "code"), [(8192, 0), (32, 2)])
def test_importing_frequencies(tmp_path: Path, original: int, code: int) -> None:
    """Llama 3's are recognised; others cannot be stated."""
    source, output = random_model(tmp_path / "source"), tmp_path / "packed"
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": original}
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    file = write_gguf(source, tmp_path / "model.gguf")
    assert main(["import", str(file), "--output", str(output)]) == code
    assert output.exists() == (not code)
    if output.exists():
        assert read_model(output).config.rope_scaling == read_model(source).config.rope_scaling
