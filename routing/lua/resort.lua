--[[ resort: give lanes the keys that the rules of now give them, some accounts at a time, after a change of rules.
  KEYS[1..12] the fleet's keys, see lib/fleet
  ARGV[1] limit   accounts at most
  Returns how many accounts are left      Jobs stay where they are inside their lanes
  Cost O(limit log lanes)    Upholds ORDER-1 ]]
-- @include lib/fleet
-- @include lib/order
-- @include lib/lanes

local accounts = redis.call("LPOP", unsorted_key(), tonumber(ARGV[1]))
for _, account in ipairs(accounts or {}) do reindex_account(account) end
return redis.call("LLEN", unsorted_key())
