"""Protected runs for tests: a data owner, sealed data, a job file, and the broker beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.protect.brokers import Owner
from support.protect.policies import LEAST, OWNER
from support.training.training import model_dir
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.protect.sealed.sealed_files import seal_path

SECRET = "the patient of room 7"
OPTIONS: dict[str, Any] = {
    "model": str(model_dir("llama")), "max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1, "max_length": 16, "lora_r": 4, "tune": False, "run_log": False,
}  # fmt: skip


@dataclass
class Hospital:
    """A data owner's files and a trainer's job in one directory, on the tiny model."""

    place: Path
    owner: Owner = field(init=False)

    def __post_init__(self) -> None:
        self.place.mkdir(exist_ok=True)
        self.owner = Owner(self.place)
        (self.place / "broker.pub").write_text(self.owner.signing.public.pem)
        self.seal("train")

    def seal(self, name: str, rows: int = 12, seed: int = 0) -> Path:
        """Rows of token ids and of text that must not be found anywhere; the plain file goes."""
        plain = self.place / f"{name}.jsonl"
        lines = [
            {"input_ids": [(3 * n + 7 * i + seed) % 60 for i in range(6 + n % 7)], "note": SECRET} for n in range(rows)
        ]
        plain.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sealed = plain.with_name(f"{plain.name}.age")
        seal_path(plain, sealed, [self.owner.data.recipient])
        plain.unlink()
        return sealed

    def policy(self, *sealed: Path, more: str = "") -> None:
        """A policy that releases the key for these files."""
        digests = ", ".join(f'"{file_digest(path)}"' for path in sealed)
        text = LEAST.replace(OWNER, self.owner.data.recipient)
        digest_lines = [line for line in text.splitlines() if line.startswith("sha256 = ")]
        self.owner.policy.write_text(text.replace(digest_lines[0], f"sha256 = [{digests}]") + more)

    def job(self, name: str = "job", broker: str | None = None, own: str = "", **options: Any) -> Path:
        where = f'broker = "{broker}"' if broker else 'files = "exchange"'
        path = self.place / f"{name}.toml"
        training = "".join(f"{key} = {json.dumps(value)}\n" for key, value in {**OPTIONS, **options}.items())
        path.write_text(
            f'[protected]\ndata = "train.jsonl.age"\noutput = "{name}"\nbroker_key = "broker.pub"\n{where}\n{own}\n'
            f'recipients = ["{self.owner.data.recipient}"]\n\n[training]\n{training}'
        )
        return path
