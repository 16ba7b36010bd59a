--[[ reset_breaker: close the breaker of a server or model, and end a server's cooldowns.
  Keys: free, cooling, slots, servers, stats, meta
  Takes
    kind: "server" | "model"
    name: text
  Returns
    moved: int      how many slots were in cooldown
  Called by routing/queue/slots.py: Slots.reset_breaker
  Clock Redis TIME    Cost O(slots log slots) ]]
-- @include lib/now_ms
-- @include lib/slots

local now, stats, moved = now_ms(), stats_key(kind, name), 0
redis.call("HDEL", stats, "open_until", "why", "opened", "probe", "streak", "rate", "runs", "failing",
  "penalty", "penalty_at", "away_since", "away_why", "silent_since")
redis.call("UNLINK", STATS .. ":failed:" .. kind .. ":" .. name)
if kind ~= "server" then return moved end

redis.call("HDEL", META, "failures:" .. name, "silent:" .. name)
for _, name_of_field in ipairs(redis.call("HKEYS", stats)) do
  if string.match(name_of_field, "^busy:") or string.match(name_of_field, "^told:") then
    redis.call("HDEL", stats, name_of_field)
  end
end
for _, slot in ipairs(redis.call("ZRANGE", COOLING, 0, -1)) do
  if server_of(slot) == name then
    redis.call("ZREM", COOLING, slot)
    make_slot_available(slot, now, 0)
    moved = moved + 1
  end
end
return moved
