-- ahead: how many jobs of its model come before a waiting one under the model's policy, if nothing else comes in.

local SAMPLE, PAGES = 512, 8 -- of more lanes than SAMPLE, this many are read, from so many places of the order

-- The lanes of a model whose key is below `key`, and how many there are for each that is read.
local function lanes_before(model, key)
  local lanes, factor = {}, 1
  for _, class in ipairs(redis.call("HKEYS", CLASSES)) do
    if string.match(class, "|([^|]*)$") == model then
      local index = class_key(class)
      local count = redis.call("ZCOUNT", index, "-inf", string.format("(%.17g", key))
      local page, step = count - 1, count
      if count > SAMPLE then
        page, step, factor = SAMPLE / PAGES - 1, math.floor(count / PAGES), count / SAMPLE
      end
      for start = 0, count - 1, math.max(step, 1) do
        for _, lane in ipairs(redis.call("ZRANGE", index, start, start + page)) do lanes[#lanes + 1] = lane end
      end
    end
  end
  return lanes, factor
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
  for _, lane in ipairs(lanes_of(it.account)) do
    local other = read_lane(lane)
    if other.tier < it.tier then own = own + redis.call("ZCARD", lane_key(lane)) end
    if other.tier == it.tier then own = own + count_before(lane, seq) end
  end
  local run_ms = tonumber(redis.call("HGET", stats_key("model", it.model), "run_ms") or "1000")
  local rules = rules_of(it.model)
  local turn = start_tag(it.tenant, it.model) + own * run_ms / terms_of(it.account, rules)
  local lanes, factor = lanes_before(it.model, turn)
  local jobs, turns = {}, {}
  for _, lane in ipairs(lanes) do
    local other = read_lane(lane)
    if other.account ~= it.account then
      local key = tonumber(redis.call("ZSCORE", class_key(other.class), lane))
      turns[other.account] = math.ceil((turn - key) * terms_of(other.account, rules) / run_ms)
      jobs[other.account] = (jobs[other.account] or 0) + redis.call("ZCARD", lane_key(lane))
    end
  end
  local others = 0
  for account, count in pairs(jobs) do others = others + math.min(count, turns[account]) end
  return own + math.floor(others * factor)
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
  local lanes, factor = lanes_before(it.model, key)
  local others, own = 0, 0
  for _, lane in ipairs(lanes) do others = others + count_in(lane, it, seq, key, rules) end
  if obstacle(it.tenant, it.account, rules) then -- Its own lanes are out of the order, but not out of its way.
    for _, lane in ipairs(lanes_of(it.account)) do own = own + count_in(lane, it, seq, key, rules) end
  end
  return own + math.floor(others * factor)
end
