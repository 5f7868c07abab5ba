"""The bundled chain reproduces the published set-up: 1,886 chat rows and 180 pairs give 177 and 45 steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.data import chat, write_jsonl
from support.gguf_models import make_adapter

from wgpu_lora.assets import DEMO_MODEL
from wgpu_lora.chain.chain_file import Chain, read_chain
from wgpu_lora.chain.stage import Watch
from wgpu_lora.chain.stages.gguf import Gguf
from wgpu_lora.chain.stages.push import Push
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.finetune import prepare_run
from wgpu_lora.train.resolve_options import find_recipe


def of_demo(place: Path) -> Chain:
    """The chain with the demo model, and made-up rows of the published counts."""
    text = find_recipe("persona").read_text()
    assert 'model = "Qwen/Qwen3.5-9B"' in text
    text = text.replace('"persona-data"', f'"{place / "rows"}"')
    (place / "persona.toml").write_text(text)
    (place / "rows").mkdir()
    chats = [{"messages": [*chat(f"question {i}", f"answer {i}")]} for i in range(1886)]
    pairs = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(180)]
    write_jsonl(place / "rows" / "chats.jsonl", *chats)
    write_jsonl(place / "rows" / "pairs.jsonl", *pairs)
    return read_chain(str(place / "persona.toml"), str(place / "out"), model="demo")


def test_the_published_steps(tmp_path: Path, device: Device) -> None:
    chain = of_demo(tmp_path)
    stages: dict[str, Any] = {link.name: link.stage for link in chain.links}
    assert [*stages] == ["prepare", "sft", "dpo", "merge", "gguf", "cards", "push"]
    chain.output.mkdir()
    stages["prepare"].run(chain.output / "prepare", Watch(), False)
    make_adapter(chain.output / "sft", DEMO_MODEL, r=64, lora_alpha=128)
    model = open_model("demo")

    def run_of(name: str, **changes: Any) -> Any:
        return prepare_run(stages[name].arguments(output=str(tmp_path / name), **changes), model)

    sft, dpo = run_of("sft"), run_of("dpo")
    assert (len(sft.stream.prepared.samples), sft.stream.total_steps()) == (1886, 177)
    assert (len(dpo.stream.prepared.samples), dpo.stream.total_steps()) == (180, 45)
    # transformers counts ceil(ceil(rows / batch) / accumulation) steps of each epoch, so does the recipe by itself.
    assert run_of("dpo", max_steps=-1).stream.total_steps() == 2 * 23
    for args, expected in (
        (sft.args, (64, 128, 0.05, 3, 1e-4, 0.05, 0.01, 16, 2, 1024, False)),
        (dpo.args, (64, 128, 0.05, 2, 5e-6, 0.1, 0.0, 4, 2, 1024, False)),
    ):
        assert expected == (
            args.lora_r, args.lora_alpha, args.lora_dropout, args.num_train_epochs, args.learning_rate,
            args.warmup_ratio, args.weight_decay, args.per_device_train_batch_size, args.gradient_accumulation_steps,
            args.max_length, args.packing,
        )  # fmt: skip
    assert (dpo.args.objective, dpo.args.beta, dpo.args.reference_adapter) == ("dpo", 0.1, str(chain.output / "sft"))
    assert (dpo.subject.config.r, dpo.subject.config.lora_alpha) == (64, 128)


def test_what_it_ends_with(tmp_path: Path) -> None:
    stages = {link.name: link.stage for link in of_demo(tmp_path).links}
    gguf, push = stages["gguf"], stages["push"]
    assert isinstance(gguf, Gguf)
    assert gguf.quantize == ["q4_k_m", "q5_k_m", "q6_k"]
    assert isinstance(push, Push)
    assert (push.private, push.dry_run, len(push.adapters), len(push.files_of)) == (True, True, 2, 1)
