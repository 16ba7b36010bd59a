--[[ resort: give lanes the keys that the rules of now give them, and classes the groups of the servers of now, some
  at a time, after a change.
  Keys: classes, groups, kinds, lanes, rules, tags, stats, held, meta
  Takes
    limit: int      accounts at most; of classes fewer, the more kinds of servers each is held against
  Returns
    left: int       accounts and classes
  Jobs stay where they are inside their lanes
  Cost O(limit log lanes)    Upholds ORDER-1, SLOT-2 ]]
-- @include lib/fleet
-- @include lib/fields
-- @include lib/rules
-- @include lib/order
-- @include lib/policies
-- @include lib/groups
-- @include lib/lanes

local accounts = redis.call("LPOP", unsorted_key(), limit)
for _, account in ipairs(accounts or {}) do reindex_account(account) end

local many = math.max(math.floor(10 * limit / math.max(redis.call("HLEN", KINDS), 10)), 1)
for _, class in ipairs(redis.call("LPOP", ungrouped_key(), many) or {}) do regroup(class) end

return redis.call("LLEN", unsorted_key()) + redis.call("LLEN", ungrouped_key())
