--[[ sync_servers: make the fleet's copy of the registry equal to the record's, and its slots with it.
  KEYS[1..8]  the fleet's keys, see lib/fleet
  ARGV[1] version  of the catalog; an older one than the copy's changes nothing
  ARGV[2…]         server, entry ("<state> <slots>\n<model>\n…\n"), slots of each server
  Returns {"synced"} | {"stale"}      A slot that holds a lease keeps it until it is released
  Clock Redis TIME    Cost O(slots log slots)    Upholds LEASE-1, SLOT-2 ]]
-- @include lib/now_ms
-- @include lib/fleet

local now, version = now_ms(), tonumber(ARGV[1])
if tonumber(redis.call("HGET", META, "catalog") or "-1") > version then return { "stale" } end

redis.call("HSET", META, "catalog", version)
redis.call("DEL", SERVERS)
local wanted = {}
for i = 2, #ARGV, 3 do
  local server = ARGV[i]
  redis.call("HSET", SERVERS, server, ARGV[i + 1])
  for n = 0, tonumber(ARGV[i + 2]) - 1 do
    local slot = server .. "-slot" .. n
    if online_entry(slot) then wanted[slot] = true end
  end
end
for _, index in ipairs({ FREE, RESTING }) do
  for _, slot in ipairs(redis.call("ZRANGE", index, 0, -1)) do
    if wanted[slot] then wanted[slot] = nil else redis.call("ZREM", index, slot) end
  end
end
for slot in pairs(wanted) do
  if redis.call("HEXISTS", SLOTS, slot) == 0 then return_slot(slot, now, 0) end
end
return { "synced" }
