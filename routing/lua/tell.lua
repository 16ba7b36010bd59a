--[[ tell: what a run's server says while it is at it grows by an entry, and whoever watches hears of it.
  Key: a stream, id "<attempt>-<ms>", field "said": JSON; a channel of the same name hears "<id> <JSON>"
  Takes
    id: text
    said: text        "": nothing more is said
    kept: int         entries that stay
    ttl_ms: int       how long they do, from now on
  Returns
    watchers: int     -1: something later has been said already, and this is told to nobody
  Writes always, unless something later has been said
  Refused when Redis is full
  Cost O(1) ]]

if said == "" then
  redis.call("PEXPIRE", KEYS[1], ttl_ms)
  return 0
end
local added = redis.pcall("XADD", KEYS[1], "MAXLEN", kept, id, "said", said)
if type(added) == "table" and added.err then return -1 end
redis.call("PEXPIRE", KEYS[1], ttl_ms)
return redis.call("PUBLISH", KEYS[1], id .. " " .. said)
