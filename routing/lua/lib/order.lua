-- order: what a policy decides.  Each is a file of lib/policies, and a row of slotkeeper/registry/policies.py; what it
-- leaves out is decided as it stands here.  In all that follows `lane` is as read_lane answers it.
--
-- Whose turn it is: the smallest key of a model's lanes is next.  Inside a lane order is always that of acceptance
-- (ORDER-1).  A policy has one of two kinds of keys:
--   head_key(priority, seq, created, rules)   from the job at a lane's head, times in ms; of equal priority it rises
--                                         with `seq`
--   account_key(lane)                     from what the account has had: the same for its lanes of a class, in which
--                                         the more urgent comes first
--   account_step(account, rules)          how much later that is with each of the account's jobs that starts
-- Among models that share a server the lower (priority, acceptance) comes first:
--   priority_among_models(priority, key, rules, now)   the priority that a model's first job has there
-- Where a job stands:
--   count_before(other, lane, seq, key, rules)   jobs of the lane `other` that come before one of `lane`, which would
--                                         have this key at its head; not asked if keys are of accounts
-- What an account is charged for slots, in ms; left out: nothing:
--   charge_offer(lane, number)            for the offer of this number; answers what was charged
--   charge_renewal(lane, used_ms)         what a run has used beyond what was charged, each time it is renewed
--   charge_end(lane, used_ms)             the same when its lease ends; less than 0: it was charged too much
--   reweigh(account, old, new)            its weight was `old` and is `new`
--   forget(model)                         no job of the model waits any more, or another policy is chosen
local policies = {
  default = nil, -- of models for which none is configured, or one that only another release knows
}

-- 2^49 jobs may be accepted before a key could leak into the next priority; nine priorities stay below 2^53.
local PRIORITY_STEP = 2 ^ 49
local PRIORITY_OF_ALL = 5 -- where priorities do not count

local function policy_called(name) return policies[name] or policies.default end
local function policy_of(model) return policy_called(rules_of(model).policy) end

local function count_accepted_before(lane, seq) return redis.call("ZCOUNT", lane_key(lane.name), "-inf", "(" .. seq) end

-- How many of a lane's jobs have a key below `key`: a bisection, since keys rise in a lane.
local function count_below(lane, key, rules)
  local low, high, head_key = 0, redis.call("ZCARD", lane_key(lane.name)), policy_of(lane.model).head_key
  while low < high do
    local middle = math.floor((low + high) / 2)
    local found = redis.call("ZRANGE", lane_key(lane.name), middle, middle, "WITHSCORES")
    local _, created = read_member(found[1])
    if head_key(lane.priority, tonumber(found[2]), created, rules) < key then low = middle + 1 else high = middle end
  end
  return low
end

-- A policy that decides nothing yet.
local function new_policy(name)
  local policy = {}

  function policy.priority_among_models(priority) return priority end

  function policy.count_before(other, lane, seq, key, rules)
    if other.priority == lane.priority then return count_accepted_before(other, seq) end
    return count_below(other, key, rules)
  end

  policies[name] = policy
  return policy
end
