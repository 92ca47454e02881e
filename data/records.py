"""From a record (a JSON object, a table's row) to a document, by `data.format`."""

from typing import Any

from .documents import BadRecord, Document

ANSWER_ROLE = "assistant"


def record_keys(record_format: str, field: str) -> tuple[str, ...]:
    """The keys or columns that a record of this format is made from."""
    if record_format == "prompt_completion":
        return ("prompt", "completion")
    if record_format == "chat":
        return ("messages" if field == "text" else field,)
    return (field,)


def document_from_record(
    record: Any, name: str, record_format: str, field: str
) -> Document | BadRecord:
    """The document that `record` holds, or why it holds none."""
    keys = record_keys(record_format, field)
    values = [record.get(key) if isinstance(record, dict) else None for key in keys]
    try:
        if record_format == "chat":
            return _chat(values[0], name, keys[0], record)
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < len(keys):
            missing = keys[[isinstance(value, str) for value in values].index(False)]
            return _no_field(record, name, missing, "text")
        if record_format == "text":
            return Document(name, texts[0])
        prompt, completion = texts
        if not completion:
            return BadRecord("no completion", name, "'completion' is empty")
        return Document(name, prompt + completion, {"prompt": prompt, "completion": completion})
    except UnicodeEncodeError:
        return BadRecord("not UTF-8", name, f"{keys[-1]!r} holds half a surrogate pair")


def _chat(messages: Any, name: str, key: str, record: Any) -> Document | BadRecord:
    if not isinstance(messages, list) or not messages:
        return _no_field(record, name, key, "list of messages")
    for number, message in enumerate(messages):
        texts = [message.get(part) for part in ("role", "content")] if _is_dict(message) else [None]
        if not all(isinstance(text, str) for text in texts):
            detail = f"message {number} of {key!r} has no text under 'role' and 'content'"
            return BadRecord("bad message", name, detail)
        if message.get("tool_calls"):
            detail = f"message {number} of {key!r} calls tools, which is not supported"
            return BadRecord("tool calls", name, detail)
    if not any(message["role"] == ANSWER_ROLE for message in messages):
        detail = f"no message of {key!r} has the role {ANSWER_ROLE!r}, so nothing is to be learned"
        return BadRecord("no answer", name, detail)
    kept = [{"role": message["role"], "content": message["content"]} for message in messages]
    return Document(name, "\n".join(message["content"] for message in kept), {"messages": kept})


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _no_field(record: Any, name: str, key: str, what: str) -> BadRecord:
    found = ", ".join(map(repr, list(record)[:8])) if isinstance(record, dict) else "no keys"
    if isinstance(record, dict) and key in record:
        found = f"{type(record[key]).__name__} there"
    reason = "no text field" if what == "text" else f"no {what}"
    names_it = "data.field, or the source's field, names the key"
    if key in ("prompt", "completion"):
        names_it = "records need prompt and completion"
    detail = f"no {what} under {key!r} (it has {found}; {names_it})"
    return BadRecord(reason, name, detail)
