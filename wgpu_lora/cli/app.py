"""The command line: Typer commands without logic of their own, and errors as one line on stderr."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Annotated, Any, cast

import typer

from wgpu_lora.cli.bench.bricks import bench
from wgpu_lora.cli.bench.kernels import kernels
from wgpu_lora.cli.bench.profile import profile
from wgpu_lora.cli.cluster import cluster
from wgpu_lora.cli.command import Command, Group, dashes
from wgpu_lora.cli.console import long_work_shown
from wgpu_lora.cli.convert import export, import_model, merge, push, quantize
from wgpu_lora.cli.data import data
from wgpu_lora.cli.demo import demo
from wgpu_lora.cli.devices import info, share, tune
from wgpu_lora.cli.finetune import finetune
from wgpu_lora.cli.inference.chat import chat
from wgpu_lora.cli.inference.evaluate import evaluate
from wgpu_lora.cli.inference.generate import generate
from wgpu_lora.cli.parameters import TrainingCommand, dashed
from wgpu_lora.cli.plan import plan
from wgpu_lora.cli.protect import protect
from wgpu_lora.cli.prove import prove
from wgpu_lora.cli.recipes import recipes, run_chain
from wgpu_lora.cli.runs import report, runs
from wgpu_lora.cli.serve import ServeCommand, serve
from wgpu_lora.cli.teacher_cache import teacher_cache
from wgpu_lora.cli.web import web
from wgpu_lora.errors import DeviceWarning, RolloutWarning, TrackingWarning, UserError
from wgpu_lora.files.paths import working_folder
from wgpu_lora.gpu.device_errors import report_native_abort
from wgpu_lora.names.spelling import COMMAND_LINE, naming
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.processes.signals import on_end_signal, repeat_discarded_interrupts

# Errors of the system that a user can fix. Any other OSError is a bug and shown with its traceback.
FIXABLE = {
    errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EFBIG, errno.ELOOP,
}  # fmt: skip

app = typer.Typer(
    name="wgpu-lora",
    help="Fine-tune language models on any GPU: QLoRA over Vulkan, Metal and DX12.",
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "token_normalize_func": dashes,  # --learning_rate is --learning-rate
    },
)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"wgpu-lora {version('wgpu-lora')}")
        raise typer.Exit()


def worker(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="JSON file with a job, or - to read it from standard input.")
    ],
) -> int:
    """Run a job for another program, with JSON lines as output.

    A job is {"job": KIND, "options": {...}}: finetune, pipeline, plan, evaluate, generate, import, bench,
    bench-training or speed, each with its options by name. Each event is a JSON object on a line of standard
    output; the last one is 'result' or 'error'.
    """
    from wgpu_lora.cluster.worker.job_process import work

    return work(job)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


app.command(cls=Command)(info)
app.command(cls=TrainingCommand)(finetune)
app.command(cls=TrainingCommand)(plan)
app.command(cls=TrainingCommand)(tune)
app.command(cls=Command)(profile)
app.command(cls=Command)(generate)
app.command(cls=Command)(chat)
app.command(cls=ServeCommand)(serve)
app.command(cls=Command)(evaluate)
app.command(cls=Command)(teacher_cache)
app.command("import", cls=Command)(import_model)
app.command(cls=Command)(quantize)
app.command(cls=Command)(merge)
app.command(cls=Command)(web)
app.command(cls=Command)(push)
app.command(cls=Command)(demo)
app.command(cls=Command)(prove)
app.command(cls=Command)(report)
app.command(cls=Command)(runs)
app.add_typer(bench)
app.add_typer(cluster)
app.command(cls=Command)(worker)
app.add_typer(data)
app.add_typer(export)
app.add_typer(kernels)
app.add_typer(protect)
app.add_typer(recipes)
app.add_typer(share)
app.command("run", cls=Command)(run_chain)


@cache
def _commands() -> Any:
    """The commands as click has them, which takes a third of a second."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0, 1 if the run failed, 2 for a user error, or 128 plus the number of the signal that ended it (130 for Ctrl-C).
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    for name in ("COMP_WORDS", "_TYPER_COMPLETE_ARGS"):  # set by shells for completion: bash uses the first
        if name in os.environ and "_WGPU_LORA_COMPLETE" in os.environ:
            os.environ[name] = dashed(os.environ[name])
    number: signal.Signals | None = None

    def end(signal_number: int) -> None:
        nonlocal number
        number = signal.Signals(signal_number)
        raise KeyboardInterrupt

    try:
        with (
            on_end_signal(end),
            repeat_discarded_interrupts(lambda: number),
            naming(COMMAND_LINE),
            _warnings(),
            report_native_abort(),
            long_work_shown(),
        ):
            working_folder()  # while it is there
            code = _commands()(list(arguments), prog_name="wgpu-lora", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        if code == 128 + signal.SIGINT:  # Typer's code for any KeyboardInterrupt
            return _ended(number)
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _refuse(*error.lines)
    except (KeyboardInterrupt, typer.Abort):
        return _ended(number)
    except BrokenPipeError:
        _settle()  # the reader of our output is gone
        return 1
    except OSError as error:
        if error.errno not in FIXABLE:
            raise
        _settle()
        return _refuse(f"{error.strerror}: {error.filename or 'while writing'}.")
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 wraps what is raised while a class is created
            return _ended(number)
        usage = getattr(error, "format_message", None)  # of Typer's errors about the command line
        if usage is None:
            raise
        return _refuse(usage())


@contextmanager
def _warnings() -> Iterator[None]:
    """Prints warnings about devices, rollouts and trackers as a line each, and others as Python does."""
    own = DeviceWarning, RolloutWarning, TrackingWarning
    with warnings.catch_warnings():
        for kind in own:
            warnings.simplefilter("always", kind)
        default_show = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *args: Any, **options: Any) -> None:
            if issubclass(category, own):
                _say(f"warning: {message}")
            else:
                default_show(message, category, *args, **options)

        warnings.showwarning = cast("Any", show)
        yield


def _ended(number: signal.Signals | None) -> int:
    number = number or signal.SIGINT
    _say("interrupted" if number == signal.SIGINT else f"ended by {number.name}")
    return 128 + number


def _refuse(message: str, *details: str) -> int:
    _say(message, *details)
    return 2


def _say(message: str, *details: str) -> None:
    lines = [escape_unprintable(" ".join(text.split())) for text in (message, *details)]
    with suppress(OSError):  # without stderr, the exit code has to do
        typer.echo("wgpu-lora: " + "\n  ".join(lines), err=True)


def _settle() -> None:
    """Discard what stdout cannot take, since Python would try to write it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
