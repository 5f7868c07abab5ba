"""Secrets in what is written about runs."""

from __future__ import annotations

import json

import pytest

from wgpu_lora.track.secret_masking import MASK, masked

SECRET = "s3cr3t-Value_42"


@pytest.mark.parametrize(
    "value",
    [
        ["wgpu-lora", "push", "--token", SECRET],
        ["wgpu-lora", f"--hub-token={SECRET}"],
        f"wgpu-lora --api-key {SECRET} --max-steps 3",
        f"https://user:{SECRET}@host/path",
        f"https://{SECRET}@host/path",
        f"postgres://user:a@{SECRET}@host/base",
        f"https://host/file?access_token={SECRET}&x=1",
        f"https://bucket/file?X-Amz-Signature={SECRET}",
        f"WANDB_API_KEY={SECRET} wgpu-lora finetune",
        f'{{"password": "{SECRET} more"}}',
        {"api_key": SECRET, "nested": [{"HF_TOKEN": SECRET}]},
        f"Authorization: Bearer {SECRET}",
        "hf_" + SECRET.replace("-", ""),
        "ghp_" + SECRET.replace("-", ""),
        f"sk-{SECRET}",
        f"PGPASSWORD={SECRET} psql",
        f"mysql --pwd={SECRET}",
        f"accessToken: {SECRET}",
        f"wgpu-lora --password '{SECRET} more' --max-steps 3",
        "npm_" + SECRET.replace("-", "") * 2,
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
    ],
)
def test_masked(value: object) -> None:
    shown = json.dumps(masked(value))
    assert MASK in shown
    assert SECRET not in shown
    assert SECRET.replace("-", "") not in shown
    assert " more" not in shown


def test_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", SECRET)
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/socket")
    monkeypatch.setenv("AWS_SECRET", "wJalr/K7MDENG/bPx")
    given = [f"note {SECRET}!", "/tmp/socket", "x wJalr/K7MDENG/bPx", "not text: \udcff"]
    assert masked(given) == [f"note {MASK}!", "/tmp/socket", f"x {MASK}", "not text: \\udcff"]


def test_what_is_no_secret_stays() -> None:
    values = {
        "command": ["wgpu-lora", "finetune", "--batch-tokens", "512", "--max-length", "16", "--data", "tokens.jsonl"],
        "data": "https://huggingface.co/datasets/a/b",
        "notes": "512 tokens: fine; author: me; keys and tokens",
        "max_new_tokens": 4,
        "target_modules": "q_proj,k_proj",
    }
    assert masked(values) == values
