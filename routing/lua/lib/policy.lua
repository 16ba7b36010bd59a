-- policy: the interface of a policy, and its defaults.  A policy is a file of lib/policies and a row of
-- slotkeeper/registry/policies.py; what it leaves out is decided here.  A `lane` is what parse_lane returns.
--
-- Inside a lane, jobs are in the order of their scores, which do not change while a policy stays.  The score of a job
-- is `seq`, the number of its acceptance (ORDER-1), unless the policy has
--   lane_score(seq, deadline)             the deadline in ms, 0: none; the result is below 2^53
-- Whose turn it is: the lane with the smallest key is next.  A policy has one of two kinds of keys:
--   head_key(priority, score, created, rules)   from the job at the lane's head, times in ms; of equal priority it
--                                         rises with `score`
--   account_key(lane)                     from what the account has used: equal for its lanes of a class, in which the
--                                         more urgent comes first
--   account_step(account, rules)          by how much that key grows with each job of the account that starts
-- Among models that share a server, the lower (priority, acceptance) comes first:
--   priority_among_models(priority, key, rules, now)   the priority that a model's first job has there
-- Where a job stands:
--   count_before(other, lane, score, key, rules)   jobs of the lane `other` that come before one of `lane`, which would
--                                         have this key at its head; not called if keys are of accounts
-- What an account is charged for slots, in ms; left out: nothing:
--   charge_offer(lane, number)            for the offer of this number; returns what was charged
--   charge_renewal(lane, used_ms)         what a run has used beyond what was charged, at each renewal
--   charge_end(lane, used_ms)             the same when its lease ends; below 0: it was charged too much
--   reweigh(account, old, new)            its weight changes from `old` to `new`
--   forget(model)                         no job of the model waits any more, or another policy is chosen
-- @include lib/rules
local policies = {
  default = nil, -- of models without a configured policy, or with one that only another release knows
}

-- 2^49 jobs can be accepted before a key reaches the next priority; nine priorities stay below 2^53.
local PRIORITY_STEP = 2 ^ 49
local PRIORITY_OF_ALL = 5 -- where priorities do not count

local function policy_called(name) return policies[name] or policies.default end
local function policy_of(model) return policy_called(rules_of(model).policy) end

-- Return the score of a job {seq, deadline_ms} in a lane of this model.
local function score_in_lane(model, job)
  local policy = policy_of(model)
  return policy.lane_score and policy.lane_score(job.seq, job.deadline_ms) or job.seq
end

local function count_accepted_before(lane, score)
  return redis.call("ZCOUNT", lane_key(lane.name), "-inf", "(" .. score)
end

-- Count a lane's jobs with a key below `key`, by bisection: keys rise in a lane.
local function count_below(lane, key, rules)
  local low, high, head_key = 0, redis.call("ZCARD", lane_key(lane.name)), policy_of(lane.model).head_key
  while low < high do
    local middle = math.floor((low + high) / 2)
    local found = redis.call("ZRANGE", lane_key(lane.name), middle, middle, "WITHSCORES")
    local _, created = parse_lane_member(found[1])
    if head_key(lane.priority, tonumber(found[2]), created, rules) < key then low = middle + 1 else high = middle end
  end
  return low
end

-- Return a policy with the defaults.
local function new_policy(name)
  local policy = {}

  function policy.priority_among_models(priority) return priority end

  function policy.count_before(other, lane, score, key, rules)
    if other.priority == lane.priority then return count_accepted_before(other, score) end
    return count_below(other, key, rules)
  end

  policies[name] = policy
  return policy
end
