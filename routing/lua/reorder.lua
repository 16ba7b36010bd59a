--[[ reorder: give lanes new offsets, after a change of policy.  Jobs stay where they are inside their lane.
  KEYS[1..8]  the fleet's keys, see lib/fleet
  ARGV[1…] lane, offset of each
  Returns how many lanes there were      Cost O(lanes log lanes)    Upholds ORDER-1 ]]
-- @include lib/fleet

local changed = 0
for i = 1, #ARGV, 2 do
  if redis.call("ZSCORE", LANES, ARGV[i]) then
    redis.call("HSET", OFFSETS, ARGV[i], ARGV[i + 1])
    reindex(ARGV[i])
    changed = changed + 1
  end
end
return changed
