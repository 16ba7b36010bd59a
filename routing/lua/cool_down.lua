--[[ cool_down: begin the cooldown of a server's free slots, longer each time in a row; or end it.
  Keys: free, cooling, slots, servers, stats, meta
  Takes
    server: text
    first_ms: int     the first cooldown, doubled each time in a row; 0: end it, except of slots whose server named the
                      time itself (release)
    max_ms: int
    why: text         what its health check says is wrong; empty: there was no answer
  Returns
    cooldown_ms: int
    moved: int        slots; 0 for a server that is not registered
  Called by routing/queue/slots.py: Slots.cool_down_command, routing/queue/slots.py: Slots.end_cooldowns
  Clock Redis TIME    Cost O(log n) a slot of the server ]]
-- @include lib/now_ms
-- @include lib/slots

local now, cooldown_ms, moved = now_ms(), 0, 0
local entry, stats = get_field(SERVERS, server), stats_key("server", server)
if not entry then return { 0, 0 } end -- it has been removed
if first_ms > 0 then
  local times = redis.call("HINCRBY", META, "failures:" .. server, 1)
  redis.call("HDEL", stats, "loaded") -- it may have been restarted
  redis.call("HSETNX", stats, "away_since", integer_text(now))
  redis.call("HSET", stats, "away_why", why)
  cooldown_ms = math.min(first_ms * 2 ^ math.min(times - 1, 30), max_ms)
else
  redis.call("HDEL", META, "failures:" .. server)
  redis.call("HDEL", stats, "away_since", "away_why")
end
for n = 0, slots_in(entry) - 1 do
  local slot = slot_name(server, n)
  local named_ms = first_ms == 0 and tonumber(redis.call("HGET", stats, "told:" .. slot) or 0) or 0
  local may_move = named_ms <= now
  if may_move and first_ms > 0 then may_move = remove_free_slot(slot) end
  if may_move and first_ms == 0 then may_move = redis.call("ZREM", COOLING, slot) == 1 end
  if may_move then
    make_slot_available(slot, now, cooldown_ms)
    moved = moved + 1
  end
end
return { cooldown_ms, moved }
