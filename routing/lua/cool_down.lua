--[[ cool_down: offer a server's free slots to nobody for a while, longer each time; or again, at once.
  Keys: free, cooling, slots, servers, stats, meta
  Takes
    server: text
    first_ms: int     the first cooldown, doubled each time in a row; 0: it is over, all is well, but for slots whose
                      server said itself when to come back (release)
    max_ms: int
  Returns
    cooldown_ms: int
    moved: int        slots; of a server that is not known nothing is noted
  Clock Redis TIME    Cost O(log n) a slot of the server ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/slots

local now, from, cooldown_ms, moved = now_ms(), COOLING, 0, 0
local entry = field(SERVERS, server)
if not entry then return { 0, 0 } end -- it has been removed
if first_ms > 0 then
  from = FREE
  local times = redis.call("HINCRBY", META, "failures:" .. server, 1)
  redis.call("HDEL", stats_key("server", server), "loaded") -- it may have been started again
  redis.call("HSETNX", stats_key("server", server), "away_since", exact(now))
  cooldown_ms = math.min(first_ms * 2 ^ math.min(times - 1, 30), max_ms)
else
  redis.call("HDEL", META, "failures:" .. server)
  redis.call("HDEL", stats_key("server", server), "away_since")
end
for n = 0, slots_in(entry) - 1 do
  local slot = server .. "-slot" .. n
  local told_ms = first_ms == 0 and tonumber(redis.call("HGET", stats_key("server", server), "told:" .. slot) or 0) or 0
  if told_ms <= now and redis.call("ZREM", from, slot) == 1 then
    return_slot(slot, now, cooldown_ms)
    moved = moved + 1
  end
end
return { cooldown_ms, moved }
