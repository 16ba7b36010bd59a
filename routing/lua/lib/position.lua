-- position: count the jobs of a model that come before a waiting one under its policy, if no other job is enqueued.
-- @include lib/lanes

local SAMPLE, PAGES = 512, 8 -- of more lanes, about SAMPLE are read; of an index, from PAGES places

-- Return some of the first `count` members of an index, evenly spread, and how many members each stands for.
local function sample(index, count, wanted)
  local pages = wanted < count and math.min(PAGES, wanted) or 1
  local size, found = math.ceil(wanted / pages), {}
  for page = 0, pages - 1 do
    local start = math.floor(page * count / pages)
    for _, member in ipairs(redis.call("ZRANGE", index, start, start + size - 1)) do found[#found + 1] = member end
  end
  return found, count / (pages * size)
end

-- Return the classes of a model, or a sample of them, whose first lane has a key below `key`, and how many classes each
-- stands for.  A class that no server can run is in the way of no other class.
local function classes_before(waiting, key)
  local classes = {}
  for _, group in ipairs(redis.call("SMEMBERS", model_groups_key(waiting.model))) do
    if group == "|" .. waiting.model then
      classes[group] = 1
    else
      local count = redis.call("ZCOUNT", group_key(group), "-inf", key)
      local found, stands_for = sample(group_key(group), count, math.min(count, SAMPLE / 2))
      for _, ranked in ipairs(found) do classes[string.sub(ranked, 3)] = stands_for end
    end
  end
  if not group_of(waiting.class) then classes[waiting.class] = 1 end
  return classes
end

-- Return the lanes of a model with a key below `key`, or a sample of them, each as {lane, how many it stands for}.
local function lanes_before(waiting, key)
  local counts, lanes, total = {}, {}, 0
  key = string.format("(%.17g", key)
  for class, stands_for in pairs(classes_before(waiting, key)) do
    local count = redis.call("ZCOUNT", class_key(class), "-inf", key)
    if count > 0 then counts[#counts + 1] = { class_key(class), count, stands_for } end
    total = total + count
  end
  for _, one in ipairs(counts) do
    local found, stands_for = sample(one[1], one[2], math.ceil(one[2] * math.min(SAMPLE / total, 1)))
    for _, name in ipairs(found) do lanes[#lanes + 1] = { parse_lane(name), stands_for * one[3] } end
  end
  return lanes
end

-- Return the lanes of the same account that are in its way: those that servers can run, and those of the same class.
local function lanes_within(waiting)
  local lanes, runs = {}, { [waiting.class] = true }
  for _, name in ipairs(lanes_of(waiting.account)) do
    local lane = parse_lane(name)
    if runs[lane.class] == nil then runs[lane.class] = group_of(lane.class) ~= nil end
    if runs[lane.class] then lanes[#lanes + 1] = lane end
  end
  return lanes
end

-- Where keys are of accounts, count the jobs of the same account, and the turns of other accounts before that one's,
-- each at most as many as it has jobs.
local function count_by_account(waiting, score, rules, policy)
  local own = 0
  for _, lane in ipairs(lanes_within(waiting)) do
    if lane.priority < waiting.priority then own = own + redis.call("ZCARD", lane_key(lane.name)) end
    if lane.priority == waiting.priority then own = own + count_accepted_before(lane, score) end
  end
  local turn = policy.account_key(waiting) + own * policy.account_step(waiting.account, rules)
  local jobs, turns, others = {}, {}, 0
  for _, found in ipairs(lanes_before(waiting, turn)) do
    local lane, stands_for = found[1], found[2]
    if lane.account ~= waiting.account then
      local key = tonumber(redis.call("ZSCORE", class_key(lane.class), lane.name))
      turns[lane.account] = math.ceil((turn - key) / policy.account_step(lane.account, rules)) * stands_for
      jobs[lane.account] = (jobs[lane.account] or 0) + redis.call("ZCARD", lane_key(lane.name)) * stands_for
    end
  end
  for account, count in pairs(jobs) do others = others + math.min(count, turns[account]) end
  return own + math.floor(others + 0.5)
end

-- Count the jobs that come before one of the lane `waiting`.
local function count_ahead(waiting, score, created)
  local rules, policy = rules_of(waiting.model), policy_of(waiting.model)
  if policy.account_key then return count_by_account(waiting, score, rules, policy) end
  local key = policy.head_key(waiting.priority, tonumber(score), created, rules)
  local others, own = 0, 0
  for _, found in ipairs(lanes_before(waiting, key)) do
    others = others + policy.count_before(found[1], waiting, score, key, rules) * found[2]
  end
  -- The lanes of a blocked account have no place in the order, but are in the way of each other.
  if tenant_blocked_by(waiting.tenant, waiting.account, rules) then
    for _, lane in ipairs(lanes_within(waiting)) do
      own = own + policy.count_before(lane, waiting, score, key, rules)
    end
  end
  return own + math.floor(others + 0.5)
end

-- Return how many jobs come before one that waits, or, `as_last`, before one that would be enqueued now; nil: it does
-- not wait.  Second result: mean slot time of the model's runs in ms; false: unknown.
local function position_of(lane, job, as_last)
  local score
  if as_last then
    score = integer_text(score_in_lane(lane.model, { seq = PRIORITY_STEP - 1, deadline_ms = job.deadline_ms }))
  else
    score = redis.call("ZSCORE", lane_key(lane.name), lane_member(job.id, job.created_ms))
  end
  if not score then return nil end
  local run_ms = math.floor(get_number(stats_key("model", lane.model), "run_ms"))
  return count_ahead(lane, score, job.created_ms), run_ms > 0 and run_ms
end
