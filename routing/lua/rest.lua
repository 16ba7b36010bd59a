--[[ rest: offer a server's free slots to nobody for a while, longer each time; or wake them.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] server   ARGV[2] first_ms: the first rest, doubled each time in a row; 0: wake, all is well
  ARGV[3] max_ms
  Returns {rest_ms, slots moved}; of a server that is not known nothing is noted
  Clock Redis TIME    Cost O(log n) a slot of the server ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/slots

local server, first, now = ARGV[1], tonumber(ARGV[2]), now_ms()
local from, rest_ms, moved = RESTING, 0, 0
local entry = field(SERVERS, server)
if not entry then return { 0, 0 } end -- it has been removed
if first > 0 then
  from = FREE
  local times = redis.call("HINCRBY", META, "failures:" .. server, 1)
  rest_ms = math.min(first * 2 ^ math.min(times - 1, 30), tonumber(ARGV[3]))
else
  redis.call("HDEL", META, "failures:" .. server)
end
for n = 0, slots_in(entry) - 1 do
  local slot = server .. "-slot" .. n
  if redis.call("ZREM", from, slot) == 1 then
    return_slot(slot, now, rest_ms)
    moved = moved + 1
  end
end
return { rest_ms, moved }
