-- priority: strict.  Of the most urgent that waits, what was accepted first is next.
local by_priority = new_policy("priority")
policies.default = by_priority

function by_priority.head_key(priority, seq) return priority * PRIORITY_STEP + seq end

function by_priority.count_before(other, lane, seq)
  if other.priority == lane.priority then return count_accepted_before(other, seq) end
  return other.priority < lane.priority and redis.call("ZCARD", lane_key(other.name)) or 0
end
