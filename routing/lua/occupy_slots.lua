--[[ occupy_slots: offer fewer of a server's slots for a while, as many as it uses for work of others.
  Keys: free, cooling
  Takes
    server: text
    count: int        how many slots others use
    cooldown_ms: int
  Returns
    cooling: int      how many of its slots are in cooldown for that
  Called by routing/queue/slots.py: Slots.mark_used_by_others
  Clock Redis TIME    Cost O(slots log slots)    Upholds SLOT-1 ]]
-- @include lib/keys
-- @include lib/now_ms

local until_ms, occupied = integer_text(now_ms() + cooldown_ms), 0
for _, index in ipairs({ COOLING, FREE }) do
  for _, slot in ipairs(redis.call("ZRANGE", index, 0, -1)) do
    if occupied < count and server_of(slot) == server then
      redis.call("ZREM", FREE, slot)
      redis.call("ZADD", COOLING, "GT", until_ms, slot) -- a longer cooldown stays as it is
      occupied = occupied + 1
    end
  end
end
return occupied
