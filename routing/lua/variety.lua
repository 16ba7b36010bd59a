--[[ variety: how many different constraints would wait if jobs of these classes came in.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] account: "<tenant>|<model>"
  ARGV[2…] class of each job, those that ask for nothing left out
  Returns {of the account, of all}; none of them twice      Writes nothing
  Cost O(lanes of the account + classes asked) ]]
-- @include lib/fleet

local own, own_count, all_count = {}, 0, redis.call("HLEN", CLASSES)

local function count_own(class)
  if not own[class] then own_count = own_count + 1 end
  own[class] = true
end

for _, mark in ipairs(redis.call("HKEYS", marks_key(ARGV[1]))) do
  local digest = string.match(mark, "|(%w+)$")
  if digest then count_own(digest .. "|" .. model_of(ARGV[1])) end
end
for i = 2, #ARGV, 1 do
  if not own[ARGV[i]] then all_count = all_count + 1 - redis.call("HEXISTS", CLASSES, ARGV[i]) end
  count_own(ARGV[i])
end
return { own_count, all_count }
