--[[ occupy: a server runs work that is not ours; offer that many fewer of its slots for a while.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] server   ARGV[2] count   how many slots others use   ARGV[3] rest_ms
  Returns how many of its slots rest now
  Clock Redis TIME    Cost O(slots log slots)    Upholds SLOT-1 ]]
-- @include lib/now_ms
-- @include lib/fleet

local server, wanted, until_ms = ARGV[1], tonumber(ARGV[2]), exact(now_ms() + tonumber(ARGV[3]))
local occupied = 0
for _, index in ipairs({ RESTING, FREE }) do
  for _, slot in ipairs(redis.call("ZRANGE", index, 0, -1)) do
    if occupied < wanted and server_of(slot) == server then
      redis.call("ZREM", FREE, slot)
      redis.call("ZADD", RESTING, "GT", until_ms, slot) -- a longer rest stays as it is
      occupied = occupied + 1
    end
  end
end
return occupied
