-- ahead: how many jobs of its model come before a waiting one under the model's policy, if nothing else comes in.

local SAMPLE, PAGES = 512, 8 -- of more lanes than SAMPLE about so many are read, of an index from so many places

-- Some of the first `count` members of an index, from all of them alike, and how many each stands for.
local function sample(index, count, wanted)
  local pages = wanted < count and math.min(PAGES, wanted) or 1
  local size, found = math.ceil(wanted / pages), {}
  for page = 0, pages - 1 do
    local start = math.floor(page * count / pages)
    for _, member in ipairs(redis.call("ZRANGE", index, start, start + size - 1)) do found[#found + 1] = member end
  end
  return found, count / (pages * size)
end

-- The classes of a model, or a sample of them, whose first lane has a key below `key`; and how many each stands for.
-- What no server here can run is in nobody's way but that of its own class.
local function classes_before(it, key)
  local classes = {}
  for _, group in ipairs(redis.call("HKEYS", GROUPS)) do
    if group == "|" .. it.model then
      classes[group] = 1
    elseif model_of(group) == it.model then
      local count = redis.call("ZCOUNT", group_key(group), "-inf", key)
      local found, stands_for = sample(group_key(group), count, math.min(count, SAMPLE / 2))
      for _, ranked in ipairs(found) do classes[string.sub(ranked, 3)] = stands_for end
    end
  end
  if not group_of(it.class) then classes[it.class] = 1 end
  return classes
end

-- The lanes of a model whose key is below `key`, or a sample of them, each as {lane, how many it stands for}.
local function lanes_before(it, key)
  local counts, lanes, total = {}, {}, 0
  key = string.format("(%.17g", key)
  for class, stands_for in pairs(classes_before(it, key)) do
    local count = redis.call("ZCOUNT", class_key(class), "-inf", key)
    if count > 0 then counts[#counts + 1] = { class_key(class), count, stands_for } end
    total = total + count
  end
  for _, one in ipairs(counts) do
    local found, stands_for = sample(one[1], one[2], math.ceil(one[2] * math.min(SAMPLE / total, 1)))
    for _, lane in ipairs(found) do lanes[#lanes + 1] = { lane, stands_for * one[3] } end
  end
  return lanes
end

-- The lanes of the account of `it` that are in its way: those that servers here can run, and those of its own class.
local function lanes_within(it)
  local lanes, runs = {}, { [it.class] = true }
  for _, lane in ipairs(lanes_of(it.account)) do
    local class = read_lane(lane).class
    if runs[class] == nil then runs[class] = group_of(class) ~= nil end
    if runs[class] then lanes[#lanes + 1] = lane end
  end
  return lanes
end

local function count_before(lane, seq) return redis.call("ZCOUNT", lane_key(lane), "-inf", "(" .. seq) end

-- How many of a lane's jobs were accepted before `created`: a bisection, since seq and time rise together.
local function count_older(lane, created)
  local low, high = 0, redis.call("ZCARD", lane_key(lane))
  while low < high do
    local middle = math.floor((low + high) / 2)
    local _, at = read_member(redis.call("ZRANGE", lane_key(lane), middle, middle)[1])
    if at < created then low = middle + 1 else high = middle end
  end
  return low
end

-- The turns that other tenants have before this one's turn comes, each at most as often as it has jobs.
local function count_fair(it, seq)
  local own = 0
  for _, lane in ipairs(lanes_within(it)) do
    local other = read_lane(lane)
    if other.tier < it.tier then own = own + redis.call("ZCARD", lane_key(lane)) end
    if other.tier == it.tier then own = own + count_before(lane, seq) end
  end
  local run_ms = math.max(tonumber(field(stats_key("model", it.model), "run_ms") or "1000"), 1)
  local rules = rules_of(it.model)
  local turn = start_of(it) + own * run_ms / terms_of(it.account, rules)
  local jobs, turns = {}, {}
  for _, found in ipairs(lanes_before(it, turn)) do
    local lane, stands_for = found[1], found[2]
    local other = read_lane(lane)
    if other.account ~= it.account then
      local key = tonumber(redis.call("ZSCORE", class_key(other.class), lane))
      turns[other.account] = math.ceil((turn - key) * terms_of(other.account, rules) / run_ms) * stands_for
      jobs[other.account] = (jobs[other.account] or 0) + redis.call("ZCARD", lane_key(lane)) * stands_for
    end
  end
  local others = 0
  for account, count in pairs(jobs) do others = others + math.min(count, turns[account]) end
  return own + math.floor(others + 0.5)
end

-- How many of a lane's jobs come before one with this key; `fair` aside.
local function count_in(lane, it, seq, key, rules)
  local tier = read_lane(lane).tier
  if rules.policy == "aging" and tier ~= it.tier then return count_older(lane, key - tier * rules.step) end
  if rules.policy == "priority" and tier < it.tier then return redis.call("ZCARD", lane_key(lane)) end
  if rules.policy == "priority" and tier > it.tier then return 0 end
  return count_before(lane, seq)
end

local function count_ahead(it, seq, created)
  local rules = rules_of(it.model)
  if rules.policy == "fair" then return count_fair(it, seq) end
  local key = KEY_OF[rules.policy]({ tier = it.tier, seq = tonumber(seq), created = created }, rules)
  local others, own = 0, 0
  for _, found in ipairs(lanes_before(it, key)) do
    others = others + count_in(found[1], it, seq, key, rules) * found[2]
  end
  if obstacle(it.tenant, it.account, rules) then -- Its own lanes are out of the order, but not out of its way.
    for _, lane in ipairs(lanes_within(it)) do own = own + count_in(lane, it, seq, key, rules) end
  end
  return own + math.floor(others + 0.5)
end

-- How many jobs come before one that waits, or, `as_last`, before one that would come in now, and the mean slot time of
-- the model's runs in ms, 0: not known; nil: it does not wait.
local function place_of(it, job, created, as_last)
  local seq = as_last and exact(TIER_STEP - 1) or redis.call("ZSCORE", lane_key(it.name), member_of(job, created))
  if not seq then return nil end
  return count_ahead(it, seq, tonumber(created)), math.floor(number_in_field(stats_key("model", it.model), "run_ms"))
end
