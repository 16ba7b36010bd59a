--[[ resort: give lanes the keys that the rules of now give them, and classes the groups of the servers of now, some
  at a time, after a change.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] limit   accounts at most; of classes fewer, the more kinds of servers each is held against
  Returns how many accounts and classes are left      Jobs stay where they are inside their lanes
  Cost O(limit log lanes)    Upholds ORDER-1, SLOT-2 ]]
-- @include lib/fleet
-- @include lib/fields
-- @include lib/rules
-- @include lib/order
-- @include lib/policies
-- @include lib/groups
-- @include lib/lanes

local accounts = redis.call("LPOP", unsorted_key(), tonumber(ARGV[1]))
for _, account in ipairs(accounts or {}) do reindex_account(account) end

local many = math.max(math.floor(10 * tonumber(ARGV[1]) / math.max(redis.call("HLEN", KINDS), 10)), 1)
for _, class in ipairs(redis.call("LPOP", ungrouped_key(), many) or {}) do regroup(class) end

return redis.call("LLEN", unsorted_key()) + redis.call("LLEN", ungrouped_key())
