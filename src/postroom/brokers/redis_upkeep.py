"""What is looked after in Redis beside the messages: how long streams grow, and whether they last.

Promise: an entry is cut off only when every group of its stream has acknowledged it, judged and
cut in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from postroom.brokers.redis_link import Line

__all__ = ["examine", "trim"]

_MOST_TRIMMED = 100_000

# One step for Redis: no group can be made, and none set back, between the look and the cut.
_TRIM = """
if redis.call('TYPE', KEYS[1]).ok ~= 'stream' then return 0 end

local function before(a, b)
    local a_time, a_number = a:match('(%d+)-(%d+)')
    local b_time, b_number = b:match('(%d+)-(%d+)')
    if #a_time ~= #b_time then return #a_time < #b_time end
    if a_time ~= b_time then return a_time < b_time end
    if #a_number ~= #b_number then return #a_number < #b_number end
    return a_number < b_number
end

local least
for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local group = {}
    for i = 1, #flat, 2 do group[flat[i]] = flat[i + 1] end
    local read = group['last-delivered-id']
    if group['pending'] > 0 then read = redis.call('XPENDING', KEYS[1], group['name'])[2] end
    if not least or before(read, least) then least = read end
end
if not least then return 0 end
return redis.call('XTRIM', KEYS[1], 'MINID', '~', least, 'LIMIT', ARGV[1])
"""


async def trim(line: Line, keys: Sequence[str]) -> int:
    """Cut off what all groups have read and acknowledged; a stream without groups stays whole."""
    gone = 0
    for key in keys:
        gone += await line.ask("EVAL", _TRIM, 1, key, _MOST_TRIMMED)
    return gone


async def examine(line: Line, keys: Sequence[str]) -> list[str]:
    """What about this server would lose messages, a sentence each."""
    info: dict[str, str] = {}
    for section in ("memory", "persistence", "replication"):
        info |= _lines(await line.ask("INFO", section))
    found = []
    policy = info.get("maxmemory_policy", "")
    if policy.startswith("allkeys"):
        found.append(
            f"Redis may evict whole streams when memory is short (maxmemory-policy {policy}): "
            "set maxmemory-policy noeviction"
        )
    if info.get("aof_enabled") == "0":
        found.append(
            "Redis keeps no append-only file, so a crash loses all since the last snapshot: "
            "set appendonly yes"
        )
    elif (fsync := await _setting(line, "appendfsync")) in ("everysec", "no"):
        found.append(
            f"Redis answers before the disk has it (appendfsync {fsync}), so a crash of the "
            "machine loses the last second or more: set appendfsync always, or have replicas"
        )
    if info.get("role") == "slave":
        found.append("this Redis is a replica and takes no writes: give the address of the master")
    for key in keys:
        kind = (await line.ask("TYPE", key)).decode()
        if kind not in ("none", "stream"):
            found.append(f"the key {key} holds a {kind} and no stream: move it, or set ?prefix=")
    return found


def _lines(text: bytes) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in text.decode("utf-8", "replace").splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


async def _setting(line: Line, name: str) -> str | None:
    """A setting of the server; None where we may not ask, as with many hosted ones."""
    answer: list[Any]
    (answer,) = await line.ask_all([("CONFIG", "GET", name)])
    return answer[1].decode() if isinstance(answer, list) and len(answer) == 2 else None
