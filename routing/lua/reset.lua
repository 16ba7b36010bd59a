--[[ reset: somebody says that a server, or a model, is well: its breaker is closed, and a server's slots rest no more.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] kind: server or model   ARGV[2] name
  Returns how many slots rest no more
  Clock Redis TIME    Cost O(slots log slots) ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/slots

local now, stats, moved = now_ms(), stats_key(ARGV[1], ARGV[2]), 0
redis.call("HDEL", stats, "open_until", "why", "opened", "probe", "streak", "rate", "runs", "failing",
  "penalty", "penalty_at")
redis.call("UNLINK", STATS .. ":failed:" .. ARGV[1] .. ":" .. ARGV[2])
if ARGV[1] ~= "server" then return moved end

redis.call("HDEL", META, "failures:" .. ARGV[2])
for _, field in ipairs(redis.call("HKEYS", stats)) do
  if string.match(field, "^busy:") then redis.call("HDEL", stats, field) end
end
for _, slot in ipairs(redis.call("ZRANGE", RESTING, 0, -1)) do
  if server_of(slot) == ARGV[2] then
    redis.call("ZREM", RESTING, slot)
    return_slot(slot, now, 0)
    moved = moved + 1
  end
end
return moved
