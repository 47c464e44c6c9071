"""What the shared store holds, and what changes it: names of keys, scripts, and how an append is packed.

    headrace:stream:ID          a Redis stream. 0-1 makes it exist; N-0 is event N, `e`, or `d` for the last
    headrace:stream:ID:meta     a hash: what is known of the stream, and its templates, each under its number
    headrace:stream:ID:reader   there while another process than the owner reads it, and for the grace period
    headrace:claim:DIGEST       what an idempotency key stands for: `claimed` or `created`, stream, body
    headrace:owner:OWNER        a gateway process's lease
    headrace:inbox:OWNER        a Redis stream: what others ask of that process

Each of them expires. One append is one script for all streams: XADD of 100 streams takes 1.5 us of the
server's time an event so, and 1.2 as 100 commands, but these cost the client 2 us more, to read 100 replies.
redis-py's own packing takes 1.5 us an argument, ours a third of that for a whole event.

A cluster will not do: a script may only touch the keys of one node. Not here: connections
(`gateway/store_link.py`), and when what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1, sha256
from typing import Final

import msgspec

PREFIX: Final = "headrace:"
STREAM_PREFIX: Final = PREFIX + "stream:"
META_SUFFIX: Final = ":meta"
INBOX_PREFIX: Final = PREFIX + "inbox:"
BORN_ID: Final = b"0-1"
END_FIELD: Final = b"d"

# Arguments: milliseconds that an ended stream is kept; then per key the number of its first event and a
# control: how many events follow, and letters for what comes before them: `v` the event before must be there,
# `m` a number below which events are dropped, `t` how many templates, and each one's number and parts;
# `x` says that the last event is the end. Replies with the places of those streams which it cannot add to.
#
# An event that is there already with the same bytes is fine: the connection broke before its reply.
# Any other error than of this one stream (no memory, a replica) ends the script; all of it is sent again.
APPEND: Final = """
local pcall, KEYS, ARGV, type, tonumber = redis.pcall, KEYS, ARGV, type, tonumber
local function top(key)
  local found = pcall('XREVRANGE', key, '+', '-', 'COUNT', 1)
  if found.err or not found[1] then return nil end
  return tonumber(string.match(found[1][1], '^%d+'))
end
local function add(key, id, field, entry)
  local reply = pcall('XADD', key, 'NOMKSTREAM', id, field, entry)
  if type(reply) == 'string' then return true end
  if not reply then return false end
  local same = pcall('XRANGE', key, id, id)
  if same.err then return false end
  if same[1] then return same[1][2][1] == field and same[1][2][2] == entry end
  local last = top(key)
  if last and last < tonumber(id) then return reply end
  return false
end
local failed
local function put(key, id, field, entry)
  local result = add(key, id, field, entry)
  if type(result) == 'table' then failed = result; return false end
  return result
end
local function slow(key, number, control, at)
  local count, flags = string.match(control, '^(%d+)(%a*)$')
  local ok, minimum, templates, first = true, nil, {}, tonumber(number)
  if string.find(flags, 'm') then minimum = ARGV[at]; at = at + 1 end
  if string.find(flags, 't') then
    local stop = at + 2 * tonumber(ARGV[at])
    for i = at + 1, stop do templates[#templates + 1] = ARGV[i] end
    at = stop + 1
  end
  if string.find(flags, 'v') then
    local last = top(key)
    ok = last ~= nil and last >= first - 1
  end
  if ok and #templates > 0 and pcall('EXISTS', key .. ':meta') ~= 1 then ok = false end
  count = tonumber(count)
  for i = 0, count - 1 do
    if ok then
      local field = 'e'
      if i == count - 1 and string.find(flags, 'x') then field = 'd' end
      ok = put(key, tostring(first + i), field, ARGV[at + i])
    end
  end
  if ok then
    for i = 1, #templates, 2 do redis.call('HSET', key .. ':meta', templates[i], templates[i + 1]) end
    if minimum then redis.call('XTRIM', key, 'MINID', minimum) end
    if string.find(flags, 'x') then
      redis.call('PEXPIRE', key, ARGV[1])
      redis.call('PEXPIRE', key .. ':meta', ARGV[1])
    end
  end
  return ok, at + count
end
local bad, at = {}, 2
for i = 1, #KEYS do
  local number, control, ok = ARGV[at], ARGV[at + 1], nil
  if control == '1' then
    ok = type(pcall('XADD', KEYS[i], 'NOMKSTREAM', number, 'e', ARGV[at + 2])) == 'string'
      or put(KEYS[i], number, 'e', ARGV[at + 2])
    at = at + 3
  else
    ok, at = slow(KEYS[i], number, control, at + 2)
  end
  if failed then return failed end
  if not ok then bad[#bad + 1] = i end
end
return bad
"""
APPEND_SHA: Final = sha1(APPEND.encode(), usedforsecurity=False).hexdigest().encode()

# Keys: stream, its meta, and a claim if there is one. Arguments: lifetime in ms, the claim before and after,
# fields and values of the meta. 0 if the claim is somebody else's by now.
CREATE: Final = """
if KEYS[3] and redis.call('GET', KEYS[3]) ~= ARGV[2] then return 0 end
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[2], ARGV[1])
redis.call('XADD', KEYS[1], '0-1', 'c', '')
redis.call('PEXPIRE', KEYS[1], ARGV[1])
if KEYS[3] then redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[1]) end
return 1
"""

# Key: a claim. Arguments: prefix and suffix of a meta's key, the new value, its ms, fields of the meta.
# Replies with what holds the claim, and its stream's meta if it is created; nothing if it was free. A claim
# whose stream is forgotten is free.
CLAIM: Final = """
local held = redis.call('GET', KEYS[1])
if held then
  local state, id = string.match(held, '^(%a+) (%x+) ')
  if state == 'claimed' then return {held} end
  local meta = redis.call('HMGET', ARGV[1] .. id .. ARGV[2], unpack(ARGV, 5))
  if meta[1] then return {held, meta} end
end
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
return {}
"""

# Key: a claim. Argument: a stream; the claim is dropped if it is that stream's.
RELEASE: Final = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%a+ (%x+) ') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

# Keys: a stream's meta, and what else there is of it. Arguments: the process that deletes it, the prefix of
# inboxes; and for its owner's, if that is another, how much it holds, a name and value, and its ms. The
# owner has it in memory and would still serve it. A store without memory deletes all the same.
DELETE: Final = """
local owner = redis.pcall('HGET', KEYS[1], 'owner')
redis.call('UNLINK', unpack(KEYS))
if type(owner) == 'string' and owner ~= ARGV[1] then
  redis.pcall('XADD', ARGV[2] .. owner, 'MAXLEN', ARGV[3], '*', ARGV[4], ARGV[5])
  redis.pcall('PEXPIRE', ARGV[2] .. owner, ARGV[6])
end
return 0
"""


def stream_key(stream_id: str) -> str:
    return STREAM_PREFIX + stream_id


def meta_key(stream_id: str) -> str:
    return STREAM_PREFIX + stream_id + META_SUFFIX


def reader_key(stream_id: str) -> str:
    return f"{STREAM_PREFIX}{stream_id}:reader"


def claim_key(key: str) -> str:
    """A client's idempotency key may be anything, and is nobody else's business."""
    return f"{PREFIX}claim:{sha256(key.encode()).hexdigest()}"


def lease_key(owner: str) -> str:
    return f"{PREFIX}owner:{owner}"


def inbox_key(owner: str) -> str:
    return INBOX_PREFIX + owner


def bulk(value: bytes) -> bytes:
    """One argument, as it is sent."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


def pack_template(parts: tuple[bytes, ...]) -> bytes:
    return msgspec.msgpack.encode(parts)


_decode_template: Final = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode


def templates_of(fields: Sequence[bytes]) -> dict[int, tuple[bytes, ...]]:
    """The templates in a meta's fields and values. Raises `msgspec.ValidationError`, `DecodeError`."""
    pairs = zip(fields[::2], fields[1::2], strict=True)
    return {int(name): _decode_template(value) for name, value in pairs if name.isdigit()}


class AppendCommand:
    """One append for many streams, being packed."""

    __slots__ = ("_arguments", "_keys", "_num_arguments", "num_bytes")

    def __init__(self, keep_ms: int) -> None:
        self._keys: list[bytes] = []
        self._arguments: list[bytes] = [bulk(b"%d" % keep_ms)]
        self._num_arguments = 1
        self.num_bytes = 0  # of entries

    def one(self, key: bytes, number: int, entry: bytes) -> None:
        """A single event of a stream, with nothing besides: the token path. `key` is packed."""
        self._keys.append(key)
        digits, num_bytes = b"%d" % number, len(entry)
        self._arguments.append(
            b"$%d\r\n%b\r\n$1\r\n1\r\n$%d\r\n%b\r\n" % (len(digits), digits, num_bytes, entry)
        )
        self._num_arguments += 3
        self.num_bytes += num_bytes

    def many(
        self,
        key: bytes,
        number: int,
        entries: Sequence[bytes],
        *,
        is_end: bool = False,
        verify: bool = False,
        first: int | None = None,
        templates: Sequence[tuple[int, tuple[bytes, ...]]] = (),
    ) -> None:
        """Events of a stream from `number` on. `first`: the oldest kept. `templates`: numbers and parts."""
        flags = b"v" * verify + b"m" * (first is not None) + b"t" * bool(templates) + b"x" * is_end
        values = [b"%d" % number, b"%d%b" % (len(entries), flags)]
        if first is not None:
            values.append(b"%d" % first)
        if templates:
            values.append(b"%d" % len(templates))
        for name, parts in templates:
            values += (b"%d" % name, pack_template(parts))
        values += entries
        self._keys.append(key)
        self._arguments += map(bulk, values)
        self._num_arguments += len(values)
        self.num_bytes += sum(map(len, entries))

    def packed(self) -> bytes:
        """The command, to be sent once the server has the script."""
        keys = self._keys
        head = b"*%d\r\n$7\r\nEVALSHA\r\n%b%b" % (
            3 + len(keys) + self._num_arguments,
            bulk(APPEND_SHA),
            bulk(b"%d" % len(keys)),
        )
        return b"".join([head, *keys, *self._arguments])
