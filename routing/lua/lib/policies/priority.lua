-- priority: strict tiers.  Of the most urgent tier that waits, what was accepted first is next.
local priority = new_policy("priority")
policies.default = priority

function priority.head_key(tier, seq) return tier * TIER_STEP + seq end

function priority.count_before(other, lane, seq)
  if other.tier == lane.tier then return count_accepted_before(other, seq) end
  return other.tier < lane.tier and redis.call("ZCARD", lane_key(other.name)) or 0
end
