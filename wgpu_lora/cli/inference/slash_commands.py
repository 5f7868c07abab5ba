"""The commands of a chat: messages that begin with a slash."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import write_new_bytes
from wgpu_lora.files.locks import is_directory
from wgpu_lora.names.text import count_noun, join_words

if TYPE_CHECKING:
    from wgpu_lora.infer.chat import Chat

HELP = """\
/adapter NAME ...   select who answers: adapters by name or directory, 'none' for
                    the base; several answer side by side
/adapters           list the adapters
/system TEXT        set the system message ('none' removes it)
/set NAME VALUE     change a setting, such as temperature 0.7; alone, list them
/reset              start a new conversation
/undo               remove the last turn
/retry              answer the last message again
/save FILE          write the conversation as JSONL to train on
/load FILE [ROW]    continue a conversation from a file
/exit               leave (or Ctrl-D)
A line that ends with a backslash continues on the next; \"\"\" begins and ends a
block. Ctrl-C stops an answer.
To send a message that begins with a slash, type two."""


class SlashCommands:
    """The commands of a chat; `say` prints a line. Each raises UserError if it cannot be carried out."""

    def __init__(self, chat: Chat, say: Callable[[str], None]):
        self.chat, self.say = chat, say
        self.retry = False  # whether to answer the last message again
        self._files: dict[Path, bytes] = {}  # files written by this conversation

    def run(self, line: str) -> bool:
        """Run a command; returns False to leave the chat."""
        name, _, argument = line[1:].partition(" ")
        commands = {
            "help": self._help,
            "adapter": self._adapter,
            "adapters": self._adapters,
            "system": self._system,
            "set": self._set,
            "reset": self._reset,
            "undo": self._undo,
            "retry": self._retry,
            "save": self._save,
            "load": self._load,
        }
        if name in ("exit", "quit", "bye", "q"):
            return False
        if name not in commands:
            raise UserError(f"There is no command /{name:.40}: /help lists them, and // starts a message with a slash.")
        if name in ("help", "adapters", "reset", "undo", "retry") and argument.strip():
            raise UserError(f"/{name} takes no argument, not {argument.strip()!r:.40}.")
        commands[name](argument.strip())
        return True

    def _help(self, argument: str) -> None:
        self.say(HELP)

    # -- who answers -----------------------------------------------------------------------------------------------

    def _adapters(self, argument: str) -> None:
        for name, where in self.chat.speakers.items():
            self.say(f"{'*' if name in self.chat.lanes else ' '} {name}  {where}")

    def _adapter(self, argument: str) -> None:
        if not argument:
            return self._adapters(argument)
        names = list(dict.fromkeys(name for text in _words(argument) for name in self._resolve_names(text)))
        self.chat.select(names)
        self.say(f"{join_words(names)} answer{'s' if len(names) == 1 else ''} from now on")

    def _resolve_names(self, text: str) -> list[str]:
        """The names that a word stands for; a directory is loaded first."""
        from wgpu_lora.infer.named_adapters import named_adapters

        chat = self.chat
        if text in chat.speakers:
            return [text]
        if text == "none":
            return [chat.base]
        if text == "all" and (adapters := [name for name in chat.speakers if name != chat.base]):
            return adapters
        ((name, directory),) = named_adapters([text]).items()
        directory = directory.expanduser()
        for adapter, where in chat.adapters.items():
            if os.path.realpath(where) == os.path.realpath(directory):
                return [adapter]
        if not is_directory(directory):
            raise UserError(f"There is no adapter '{text}': /adapters lists them, or give a directory.")
        chat.add(name, directory)
        return [name]

    # -- how it answers --------------------------------------------------------------------------------------------

    def _system(self, argument: str) -> None:
        if not argument:
            self.say(f"system: {self.chat.settings.system or 'none'}")
            return
        text = None if argument.lower() == "none" else argument
        if text is not None and not self.chat.templated:
            raise UserError("The model has no chat template, so it cannot use a system message.")
        self.chat.settings = replace(self.chat.settings, system=text)
        self.say("the system message is set" if text else "there is no system message")

    def _set(self, argument: str) -> None:
        from wgpu_lora.infer.generation_options import GenerationOptions, generation_options, parsed
        from wgpu_lora.names.aliases import aliases_of

        names = [f.name for f in fields(GenerationOptions) if f.name != "system"]
        name, _, value = argument.partition(" ")
        name = name.strip("-").replace("-", "_")
        name = aliases_of(names).get(name, name)
        current = {name: getattr(self.chat.settings, name) for name in names}
        if not name:
            for setting, current_value in current.items():
                self.say(f"{setting} = {_setting_text(current_value)}")
            return
        if name not in names:
            generation_options({name: None}, "/set")  # lists the settings
            raise UserError("Set the system message with /system TEXT.")
        if not value.strip():
            self.say(f"{name} = {_setting_text(current[name])}")
            return
        self.chat.settings = replace(self.chat.settings, **{name: parsed(name, value.strip())})
        self.say(f"{name} = {_setting_text(getattr(self.chat.settings, name))}")

    # -- what was said ---------------------------------------------------------------------------------------------

    def _reset(self, argument: str) -> None:
        self.chat.reset()
        self._files.clear()
        self.say("started a new conversation")

    def _undo(self, argument: str) -> None:
        text = self.chat.undo()
        self.say(f"removed: {text if len(text) <= 60 else text[:57] + '...'}")

    def _retry(self, argument: str) -> None:
        if not any(lane.messages for lane in self.chat.lanes.values()):
            raise UserError("No message has been sent yet: send one first.")
        if self.chat.settings.temperature == 0:
            self.say("at temperature 0 the answer stays the same: /set temperature 0.7 varies it")
        self.retry = True

    def _save(self, argument: str) -> None:
        from wgpu_lora.infer.chat import rows_of, to_jsonl

        path = _one_path(argument, "/save FILE")
        rows = rows_of(self.chat.lanes.values(), self.chat.settings.system, self.chat.templated)
        if not rows:
            raise UserError("No message has been sent yet, so there is nothing to save.")
        data, before = to_jsonl(rows), self._files.get(path.absolute())
        write_new_bytes(path, data, "/save", replacing=before)
        self._files[path.absolute()] = data
        self.say(f"saved {count_noun(len(rows), 'row')} in {path}")

    def _load(self, argument: str) -> None:
        from wgpu_lora.infer.chat import read_conversations

        if not self.chat.templated:
            raise UserError("The model has no chat template, so it cannot continue a conversation.")
        words = _words(argument)
        row = words.pop() if len(words) == 2 and words[1].isdecimal() else "1"
        path = _one_path(shlex.join(words), "/load FILE [ROW]")
        result = read_conversations(path)
        if not 1 <= int(row) <= len(result):
            raise UserError(f"{path} has {len(result):,} rows, counted from 1: there is no row {row}.")
        system, messages = result[int(row) - 1]
        cut = len(messages)
        while cut and messages[cut - 1]["role"] != "assistant":
            cut -= 1
        self.chat.settings = replace(self.chat.settings, system=system)
        self.chat.reset(messages[:cut])
        self._files.clear()
        note = "" if cut == len(messages) else "; messages after the last answer are left out"
        self.say(f"continuing from row {row} of {len(result):,}, {count_noun(cut, 'message')}{note}")


def _setting_text(value: object) -> str:
    """A setting as the user would type it."""
    if value is None or value == ():
        return "none"
    return json.dumps(value, ensure_ascii=False)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, posix=os.name != "nt")
    except ValueError:
        raise UserError(f"A quote in {text!r:.60} is not closed.") from None


def _one_path(text: str, usage: str) -> Path:
    words = _words(text)
    if len(words) != 1:
        raise UserError(f"{usage} takes one file{': quote a name with spaces' if words else ''}.")
    return Path(words[0]).expanduser()
