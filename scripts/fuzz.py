"""Feeds mutated files to everything that reads other people's: nothing but UserError may come out (`make fuzz`).

    python scripts/fuzz.py [--inputs 1000000] [--jobs 2] [--keep DIR] [TARGET ...]

Atheris (libFuzzer) mutates valid files, keeps what reaches new code, and stops at an exception, at an allocation beyond
64 MiB and at an input that takes longer than some seconds; instrumented code is several times slower than it is in
use. What failed is kept, and `python scripts/fuzz.py TARGET --replay FILE` runs it again.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

from fuzz_mutators import of_json, of_parts, of_safetensors, of_template

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "tests" / "fixtures" / "models"
DEMO = ROOT / "wgpu_lora" / "demo" / "model"
TEMPLATES = ROOT / "tests" / "fixtures" / "data"
ALLOCATION_MB, SECONDS = 64, 10
Target = Callable[[bytes], None]


def scratch() -> Path:
    """A directory in memory where there is one: a target writes a file for every input."""
    return Path(tempfile.mkdtemp(prefix="wgpu-lora-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))


def safetensors_header(place: Path) -> Target:
    from wgpu_lora.formats.checkpoint import read_header

    path = place / "model.safetensors"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        read_header(path)

    return run


def shard_index(place: Path) -> Target:
    from wgpu_lora.formats.checkpoint import INDEX, Checkpoint

    for shard in (MODELS / "llama").glob("*.safetensors"):
        shutil.copy(shard, place)

    def run(data: bytes) -> None:
        (place / INDEX).write_bytes(data)
        Checkpoint(place)

    return run


def model_config(place: Path) -> Target:
    from wgpu_lora.models.config import ModelConfig
    from wgpu_lora.models.rope import inv_freq

    def run(data: bytes) -> None:
        (place / "config.json").write_bytes(data)
        config = ModelConfig.load(place)
        if config.num_hidden_layers < 100 and config.head_dim < 1000:
            config.parameter_shapes()
            inv_freq(config)

    return run


def adapter(place: Path) -> Target:
    """The two files of an adapter, one after the other in the input."""
    from wgpu_lora.formats.peft import CONFIG, WEIGHTS, read_adapter

    def run(data: bytes) -> None:
        config, _, weights = data.partition(b"\n\n")
        (place / CONFIG).write_bytes(config)
        (place / WEIGHTS).write_bytes(weights)
        read_adapter(place)

    return run


def packed_model(place: Path) -> Target:
    from wgpu_lora.formats.bitsandbytes import PackedCheckpoint
    from wgpu_lora.models.config import ModelConfig

    config = ModelConfig.load(MODELS / "qwen2")

    def run(data: bytes) -> None:
        (place / "model.safetensors").write_bytes(data)
        PackedCheckpoint(place).check_against(config)

    return run


def tokenizer(place: Path) -> Target:
    """The settings beside a tokenizer.json, template included."""
    import tokenizers

    from wgpu_lora.data import Tokenizer

    shutil.copy(DEMO / "tokenizer.json", place)
    backend = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))

    def run(data: bytes) -> None:
        config, _, generation = data.partition(b"\n\n")
        (place / "tokenizer_config.json").write_bytes(config)
        (place / "generation_config.json").write_bytes(generation)
        # Reading the vocabulary anew for every input would be all that is tested.
        with patch.object(tokenizers.Tokenizer, "from_file", staticmethod(lambda path: backend)):
            found = Tokenizer.load(place)
        if found is not None:
            _ = found.stop_ids, found.eos_id, found.bos_id, found.pad_id

    return run


def tokenizer_json(place: Path) -> Target:
    """The vocabulary itself, which the tokenizers library reads; and a text by it."""
    from wgpu_lora.data import Tokenizer

    def run(data: bytes) -> None:
        (place / "tokenizer.json").write_bytes(data)
        found = Tokenizer.load(place)
        if found is not None:
            found.decode(found.encode("Hi <|im_end|> 12\n", add_special_tokens=True)[:9])

    return run


def chat_template(place: Path) -> Target:
    from wgpu_lora.data import sandbox, template

    sandbox.MAX_WORK = 1 << 14  # what has no end is ended sooner, and more inputs are tried
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi <there>"}]

    def run(data: bytes) -> None:
        template.render(data.decode("utf-8", "replace"), messages, None, True, {"bos_token": "<s>"})

    return run


def gguf(place: Path) -> Target:
    from wgpu_lora.models.files import read_model

    path = place / "model.gguf"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        read_model(path)

    return run


TARGETS: dict[str, Callable[[Path], Target]] = {
    made.__name__: made
    for made in (
        safetensors_header,
        shard_index,
        model_config,
        adapter,
        packed_model,
        tokenizer,
        tokenizer_json,
        chat_template,
        gguf,
    )
}


SLOW = ("packed_model", "tokenizer_json", "chat_template", "gguf")  # these get a quarter of the others' inputs
# What keeps an input's shape; the others are mutated byte by byte alone.
MUTATORS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "safetensors_header": of_safetensors,
    "shard_index": of_json,
    "model_config": of_json,
    "adapter": of_parts,
    "packed_model": of_safetensors,
    "tokenizer": of_parts,
    "tokenizer_json": of_json,
    "chat_template": of_template,
}


def seeds(target: str) -> list[bytes]:
    """Valid inputs of a target."""
    if target == "safetensors_header":
        return [path.read_bytes() for path in MODELS.glob("llama/*.safetensors")]
    if target == "shard_index":
        return [path.read_bytes() for path in MODELS.glob("*/*.index.json")]
    if target == "model_config":
        return [path.read_bytes() for path in [*MODELS.glob("*/config.json"), DEMO / "config.json"]]
    if target == "tokenizer":
        parts = [(DEMO / name).read_bytes() for name in ("tokenizer_config.json", "generation_config.json")]
        return [b"\n\n".join(parts)]
    if target == "chat_template":
        return [path.read_bytes() for path in [*TEMPLATES.glob("*.jinja"), DEMO / "chat_template.jinja"]]
    with tempfile.TemporaryDirectory() as directory:
        return _made(target, Path(directory))


def _made(target: str, place: Path) -> list[bytes]:
    import numpy as np

    if target == "adapter":
        from wgpu_lora.formats.peft import CONFIG, WEIGHTS, AdapterConfig, tensor_name, write_adapter

        shapes = {"A": (2, 3), "B": (4, 2)}
        tensors = {tensor_name(0, "q_proj", kind): np.ones(shape, np.float32) for kind, shape in shapes.items()}
        write_adapter(place / "a", tensors, AdapterConfig(r=4, rank_pattern={"q_proj": 2}, alpha_pattern={".*v": 3}))
        return [(place / "a" / CONFIG).read_bytes().strip() + b"\n\n" + (place / "a" / WEIGHTS).read_bytes()]
    if target == "tokenizer_json":
        return [small_tokenizer()]
    if target == "packed_model":
        from wgpu_lora.cli import main

        main(["import", str(MODELS / "qwen2"), "--output", str(place / "p")])
        return [(place / "p" / "model.safetensors").read_bytes()]
    from wgpu_lora.cli import main

    model = place / "model"
    shutil.copytree(MODELS / "qwen3", model)
    shutil.copy(DEMO / "tokenizer_config.json", model)
    shutil.copy(DEMO / "chat_template.jinja", model)
    (model / "tokenizer.json").write_bytes(small_tokenizer())
    main(["export", "gguf", "--model", str(model), "--output", str(place / "m.gguf"), "--quantize", "q4_0"])
    return [(place / "m.gguf").read_bytes()]


def small_tokenizer() -> bytes:
    """The demo's tokenizer.json, cut to the vocabulary of the smallest model."""
    stated = json.loads((DEMO / "tokenizer.json").read_text())
    part = stated["model"]
    part["vocab"] = {token: number for token, number in part["vocab"].items() if number < 266}
    part["merges"] = [pair for pair in part["merges"] if "".join(pair) in part["vocab"]]
    for number, token in enumerate(stated["added_tokens"]):
        token["id"] = 266 + number
    return json.dumps(stated).encode()


def fuzz(target: str, inputs: int, keep: Path, replay: Path | None) -> None:
    """Runs in a process of its own, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["wgpu_lora"]):
        import wgpu_lora.data.template
        import wgpu_lora.formats.bitsandbytes
        import wgpu_lora.formats.peft
        import wgpu_lora.models.files  # noqa: F401
    from wgpu_lora.errors import UserError

    place = scratch()
    run = TARGETS[target](place)

    def one(data: bytes) -> None:
        try:
            run(data)
        except UserError as error:
            str(error).encode("utf-8", "backslashreplace")

    if replay:
        return one(replay.read_bytes())
    corpus, words = place / "corpus", place / "words"
    corpus.mkdir()
    for number, seed in enumerate(seeds(target)):
        (corpus / str(number)).write_bytes(seed)
    words.write_text("\n".join(json.dumps(word) for word in dictionary(corpus)) + "\n")
    keep.mkdir(parents=True, exist_ok=True)
    limits = [f"-runs={inputs}", f"-malloc_limit_mb={ALLOCATION_MB}", f"-timeout={SECONDS}", "-rss_limit_mb=2048"]
    options = [f"-dict={words}", f"-artifact_prefix={keep}/{target}-", "-print_final_stats=1", "-max_len=400000"]

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        shaped = MUTATORS.get(target)
        if shaped is None or rng.random() < 0.3:
            return atheris.Mutate(data, max_size)
        return shaped(data, rng)[:max_size]

    atheris.Setup([sys.argv[0], *limits, *options, str(corpus)], one, custom_mutator=mutate)
    atheris.Fuzz()


def dictionary(corpus: Path) -> list[str]:
    """Words of the valid inputs, and what has been wrong with files before."""
    text = b" ".join(path.read_bytes() for path in corpus.iterdir())
    words = {word.decode() for word in re.findall(rb"[A-Za-z_][A-Za-z_.]{2,40}", text)}
    odd = ["NaN", "-1", "1e999", "null", "true", "[]", "{}", "[[", "9" * 30, "0.5", "../", "/dev/zero", "\\ud800", "{%",
           "{{", "%}", "}}", "for i in range(99999)", "endfor", "* 99999", "** 9999", "(a+)+$"]  # fmt: skip
    return sorted(words)[:400] + odd


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets together")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="where inputs that failed go")
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    targets = args.targets or list(TARGETS)
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"{', '.join(unknown)}: no such target")
    if args.child or args.replay:
        fuzz(targets[0], args.inputs, args.keep, args.replay)
        return 0
    shares = {target: 1 if target in SLOW else 4 for target in targets}

    def child(target: str) -> tuple[str, int, int, float]:
        each = -(-args.inputs * shares[target] // sum(shares.values()))
        command = [sys.executable, __file__, target, "--child", "--inputs", str(each), "--keep", str(args.keep)]
        begin = time.monotonic()
        with (args.keep / f"{target}.log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        found = re.findall(r"number_of_executed_units:\s*(\d+)", (args.keep / f"{target}.log").read_text())
        return target, code, int(found[-1]) if found else 0, time.monotonic() - begin

    args.keep.mkdir(parents=True, exist_ok=True)
    failed = total = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for target, code, inputs, seconds in pool.map(child, targets):
            failed += code != 0
            total += inputs
            verdict = "ok" if code == 0 else f"FAILED: {args.keep}/{target}.log"
            print(f"{target:20} {inputs:>10,} inputs {seconds:>6.0f} s  {verdict}", flush=True)
    print(f"{'all':20} {total:>10,} inputs")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
