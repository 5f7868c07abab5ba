"""A worker's program that trains nothing: it takes steps, writes checkpoints and answers requests as workers do.

Its job's options say how: `steps`, `pace` (seconds per step), `template` (a checkpoint to write again and again),
`leave` (a step at which it ends with exit code 3), `error` (the kind of an error).
It imports nothing of the package, so that it starts at once.
"""

import hashlib
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

ASKED: set[str] = set()


def say(event: str, **facts: object) -> None:
    print(json.dumps({"schema": 1, "event": event, "time": time.time(), **facts}), flush=True)


def listen() -> None:
    for line in sys.stdin:
        said = json.loads(line)
        ASKED.add("stop" if said["request"] == "stop" else said.get("adapter") or "end")
    os._exit(129)


def write(template: str, place: Path, step: int) -> None:
    """A checkpoint of a step, by renaming."""
    hidden = place.with_name(f".{place.name}.tmp")
    shutil.copytree(template, hidden)
    said = json.loads((hidden / "state.json").read_text())
    said["state"]["step"] = step
    (hidden / "state.json").write_text(json.dumps(said, indent=1))
    (hidden / "adapter_model.safetensors").write_bytes(step.to_bytes(4, "little") * 300)
    names = sorted(path.name for path in hidden.iterdir() if path.name != "manifest.json")
    found = {name: hashlib.sha256((hidden / name).read_bytes()).hexdigest() for name in names}
    (hidden / "manifest.json").write_text(json.dumps({"sha256": found}, indent=1) + "\n")
    hidden.rename(place)


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    options = job["options"]
    if job["job"] == "speed":
        say("result", code=0, said="", result={"tokens_per_second": 1.0, "joined_speedup": 1.0, "beside": []})
        return 0
    threading.Thread(target=listen, daemon=True).start()
    say("begin", job="finetune", pid=os.getpid())
    output = Path(options["output"])
    steps = output / "checkpoints"
    steps.mkdir(parents=True, exist_ok=True)
    began = max((int(path.name.removeprefix("step-")) for path in steps.iterdir()), default=0)
    if bool(options.get("resume")) != bool(began):
        say("error", kind="UserError", message="There is nothing to resume, or something.")
        return 2
    if options.get("error"):
        say("error", kind=options["error"], message="It is as it is.")
        return 2
    log = output / "log.jsonl"
    if log.exists():  # the copy of a log may be newer than that of the checkpoint
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:began]))
    reason = "max steps"
    for step in range(began + 1, options["steps"] + 1):
        time.sleep(options.get("pace", 0.01))
        say("step", step=step, total_steps=options["steps"], loss=1 / step, seconds=0.01, step_processed_tokens=10,
            adapter=None, eval_loss=None)  # fmt: skip
        with log.open("a") as out:
            out.write(json.dumps({"step": step, "loss": 1 / step}) + "\n")
        if step == options.get("leave"):
            return 3
        last = step == options["steps"] or ASKED
        if step % options["save_steps"] == 0 or last:
            write(options["template"], steps / f"step-{step}", step)
            say("saved", directory=str(steps / f"step-{step}"), step=step, adapter=None)
        if ASKED:
            reason = "interrupt" if "stop" in ASKED else "request"
            break
    (output / "run.json").write_text("{}")
    say("retired", reason=reason, adapter=None)
    say("result", code=0, said=reason, result={})
    return 143 if reason == "interrupt" else 0


if __name__ == "__main__":
    sys.exit(main())
