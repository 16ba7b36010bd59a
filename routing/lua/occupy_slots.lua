--[[ occupy_slots: offer fewer of a server's slots for a while, as many as it uses for work of others.
  Keys: free, cooling, servers
  Takes
    server: text
    count: int        how many slots others use
    cooldown_ms: int
  Returns
    cooling: int      how many of its slots are in cooldown for that
  Called by routing/queue/slots.py: Slots.mark_used_by_others
  Clock Redis TIME    Cost O(log n) a slot of the server    Upholds SLOT-1 ]]
-- @include lib/now_ms
-- @include lib/slots

local until_ms, occupied = integer_text(now_ms() + cooldown_ms), 0
local entry = get_field(SERVERS, server)
for _, index in ipairs({ COOLING, FREE }) do
  local found = {}
  for n = 0, entry and slots_in(entry) - 1 or -1 do
    local slot = slot_name(server, n)
    local score = tonumber(redis.call("ZSCORE", index, slot) or nil)
    if score then found[#found + 1] = { slot = slot, score = score } end
  end
  table.sort(found, function(a, b) return a.score < b.score or (a.score == b.score and a.slot < b.slot) end)
  for _, one in ipairs(found) do
    if occupied < count then
      remove_free_slot(one.slot)
      redis.call("ZADD", COOLING, "GT", until_ms, one.slot) -- a longer cooldown stays as it is
      occupied = occupied + 1
    end
  end
end
return occupied
