--[[ reindex_lanes: after a change of rules or servers, set the keys of lanes and the groups of classes, some at a time.
  Keys: classes, groups, kinds, lanes, rules, tags, stats, held, meta
  Takes
    limit: int      accounts at most; fewer classes, the more kinds of servers each is compared with
  Returns
    left: int       accounts and classes that remain; call it again until there are none
  Jobs keep their places inside their lanes
  Called by routing/queue/slots.py: Slots._reindex_lanes
  Cost O(limit log lanes)    Upholds ORDER-1, SLOT-2 ]]
-- @include lib/lanes

local accounts = redis.call("LPOP", accounts_to_reindex_key(), limit)
for _, account in ipairs(accounts or {}) do reindex_account(account) end

local many = math.max(math.floor(10 * limit / math.max(redis.call("HLEN", KINDS), 10)), 1)
for _, class in ipairs(redis.call("LPOP", classes_to_regroup_key(), many) or {}) do regroup(class) end

return redis.call("LLEN", accounts_to_reindex_key()) + redis.call("LLEN", classes_to_regroup_key())
