"""Chat templates: messages to the text that a chat model was trained on.

Templates are Jinja programs from untrusted files: they run in an immutable sandbox with the few helpers their authors
expect (trim_blocks, lstrip_blocks, break and continue, tojson, raise_exception, strftime_now, generation blocks).

What a message says must not be able to end its turn. Before rendering, every control-token string inside the messages
gets a mark put into it (`mark`), so that it is no longer that string; the template runs on the marked messages;
encoding then finds only the control tokens that the template wrote, and drops the marks. Text without such strings is
not touched, so templates that trim, measure or search the content see what they expect.
"""

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxlm.errors import JaxlmTypeError, TokenizerError
from jaxlm.vocab import MARK, Added

OWN_ROLES = ("assistant", "model")  # messages that the model wrote


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the model's own words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # no HTML escapes, unlike Jinja's own


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _tojson
    env.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return env


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise TokenizerError(f"The chat template is not valid: {_one_line(error)}.") from None


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str | Mapping[str, Any] | None = None,
    eos_token: str | Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **extra: Any,
) -> str:
    """Text of a chat.

    messages: {"role": ..., "content": ...} each; entries that are None count as absent. Tokens may be given as strings
    or as {"content": ...}; absent ones are undefined in the template. `extra` goes to the template as it is.
    Raises TokenizerError with the template's own message on one line, JaxlmTypeError if messages are no list of dicts.
    """
    if isinstance(messages, (str, Mapping)) or not all(isinstance(m, Mapping) for m in messages):
        raise JaxlmTypeError(f"messages must be a list of dicts with role and content, not {messages!r:.80}.")
    tokens = {"bos_token": bos_token, "eos_token": eos_token} | extra
    values = {name: _text_of(value) for name, value in tokens.items() if value is not None}
    plain = [{key: value for key, value in m.items() if value is not None} for m in messages]
    try:
        return _compiled(template).render(
            messages=plain, tools=tools, add_generation_prompt=add_generation_prompt, **values
        )
    except TokenizerError:
        raise
    except Exception as error:  # a template can fail in any way that Python can
        raise TokenizerError(f"The chat template refused the messages: {_one_line(error)}.") from None


def _text_of(value: Any) -> Any:
    return value["content"] if isinstance(value, Mapping) and isinstance(value.get("content"), str) else value


def _one_line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__).rstrip(".")


def guarded_tokens(added: Iterable[Added], template: str | None) -> frozenset[str]:
    """The token strings that text from a user must not be able to make.

    All control tokens, and those other added tokens that the template writes as turn marks (some files do not flag
    theirs as special). Not blank ones, and not those that the template looks for in the content, such as "</think>".
    """
    written, sought = _template_strings(template) if template else ("", "")
    return frozenset(
        token.text
        for token in added
        if token.special or (token.text in written and token.text not in sought and not token.text.isspace())
    )


@lru_cache(maxsize=16)
def _template_strings(template: str) -> tuple[str, str]:
    """All text that a template may write, and the strings it compares with or passes to methods; NUL-joined."""
    try:
        tree = _environment().parse(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise TokenizerError(f"The chat template is not valid: {_one_line(error)}.") from None
    consts = [c for c in tree.find_all(nodes.Const) if isinstance(c.value, str)]
    written = [d.data for d in tree.find_all(nodes.TemplateData)] + [c.value for c in consts]
    tests: list[nodes.Node] = list(tree.find_all(nodes.Compare))
    tests += [n for n in tree.find_all(nodes.Call) if isinstance(n.node, nodes.Getattr)]
    sought = [c.value for n in tests for c in n.find_all(nodes.Const) if isinstance(c.value, str)]
    return "\0".join(written), "\0".join(sought)


def mark(value: Any, tokens: re.Pattern[str]) -> Any:
    """The value with a mark inside every token string, through lists and dicts (values only)."""
    if isinstance(value, str):
        return tokens.sub(lambda m: m[0][0] + MARK + m[0][1:], value) if tokens.search(value) else value
    if isinstance(value, Mapping):
        return {key: mark(item, tokens) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mark(item, tokens) for item in value]
    return value


def mark_messages(
    messages: Sequence[Mapping[str, Any]], guarded: re.Pattern[str], control: re.Pattern[str]
) -> Sequence[Mapping[str, Any]]:
    """Messages with their token strings marked; the model's own may hold added tokens that are not control tokens."""
    if not isinstance(messages, (list, tuple)):
        return messages
    own = [isinstance(m, Mapping) and m.get("role") in OWN_ROLES for m in messages]
    return [mark(m, control if mine else guarded) for m, mine in zip(messages, own, strict=True)]
