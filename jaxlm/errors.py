"""Every error that jaxlm raises on bad input.

One clear sentence: what is wrong, where, and what is allowed. The command line prints it as one line and exits with 2.
"""


LONGEST = 2000  # Characters of a message: a damaged file may hold a name of any length.


class JaxlmError(ValueError):
    """Base of all errors about what the caller gave: a value, a file, a prompt or a flag."""

    def __str__(self) -> str:
        text = super().__str__()
        half = LONGEST // 2
        return text if len(text) <= LONGEST else f"{text[:half]} [...] {text[-half:]}"


class ConfigError(JaxlmError):
    """A model configuration is contradictory, incomplete or not understood."""


class CheckpointError(JaxlmError):
    """A checkpoint file or folder is missing something, damaged, or holds what is not understood."""


class TokenizerError(JaxlmError):
    """A vocabulary or chat template is damaged, missing or not understood."""


class RequestError(JaxlmError):
    """A prompt, a token id or a generation setting is out of range."""


class JaxlmTypeError(JaxlmError, TypeError):
    """A value has the wrong type (also a TypeError)."""
