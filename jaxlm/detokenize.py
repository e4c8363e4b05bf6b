"""Text out of ids as they come, one at a time, at constant cost per id: whole characters, and stop strings.

Feed each id to a `Detokenizer`, each piece it returns to `StopStrings`, show what comes out, and leave when `stopped`.
At the end: `stops.feed(detokenizer.flush()) + stops.flush()`.
"""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxlm.errors import JaxlmTypeError, RequestError

if TYPE_CHECKING:
    from jaxlm.tokenizer import Tokenizer


class Detokenizer:
    """Turns ids into pieces of text that never hold half a character.

    The pieces and the final flush join to decode(prompt + ids) less its beginning decode(prompt). If the prompt ends
    within a character, that character comes whole with the first piece. Ids that are no valid UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: "Tokenizer", prompt_ids: Sequence[int] = (), *, keep_special: bool = False):
        self._tokenizer = tokenizer
        self._keep = keep_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Only the very first space of a text is the vocabulary's own.
        self._strip = tokenizer.strips_space and not any(map(self._bytes, prompt_ids))
        self._decoder.decode(self._tail(prompt_ids))

    def _bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(int(token), keep_special=self._keep)

    def _tail(self, ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt, enough to know which character it stopped in."""
        tail = b""
        for token in reversed(ids):
            tail = self._bytes(token) + tail
            if len(tail) >= 8:
                break
        return tail

    def feed(self, token: int) -> str:
        """The text that is complete now that this id came; often one piece late for a character of several ids."""
        return self._out(self._decoder.decode(self._bytes(token)))

    def flush(self) -> str:
        """What is left when no id follows: nothing, or U+FFFD for an unfinished character."""
        return self._out(self._decoder.decode(b"", final=True))

    def _out(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """Cuts a stream of text before the first stop string in it.

    `feed` returns the text that is safe to show; text that may be the beginning of a stop string is held back until it
    is known. The stop string that is complete first wins, however the text was cut into pieces; then `stopped` is true
    and nothing more comes. Without one, `flush` returns what was held back.
    """

    def __init__(self, stops: Sequence[str] | str = ()):
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in stops:
            if not isinstance(stop, str):
                raise JaxlmTypeError(f"stop must be a string or a list of strings, not {stop!r}.")
            if not stop:
                raise RequestError('stop holds the empty string ""; a stop string needs at least one character.')
        self._stops = stops
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0)

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text
