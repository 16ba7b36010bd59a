-- priority: the most urgent job is next; of equally urgent ones, the one that was accepted first.
-- @include lib/policy
local by_priority = new_policy("priority")
policies.default = by_priority

function by_priority.head_key(priority, seq) return priority * PRIORITY_STEP + seq end

function by_priority.count_before(other, lane, seq)
  if other.priority == lane.priority then return count_accepted_before(other, seq) end
  return other.priority < lane.priority and redis.call("ZCARD", lane_key(other.name)) or 0
end
