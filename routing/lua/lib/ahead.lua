-- ahead: how many jobs of its model come before a waiting one under the model's policy, if nothing else comes in.

local SAMPLE, PAGES = 512, 8 -- of more lanes than SAMPLE about so many are read, of a class from so many places

-- Some of the first `count` lanes of a class, from all of them alike, each as {lane, how many it stands for}.
local function add_sample(lanes, index, count, wanted)
  local pages = wanted < count and math.min(PAGES, wanted) or 1
  local size = math.ceil(wanted / pages)
  for page = 0, pages - 1 do
    local start = math.floor(page * count / pages)
    for _, lane in ipairs(redis.call("ZRANGE", index, start, start + size - 1)) do
      lanes[#lanes + 1] = { lane, count / (pages * size) }
    end
  end
end

-- The lanes of a model whose key is below `key`, or a sample of them.
local function lanes_before(model, key)
  local counts, lanes, total = {}, {}, 0
  for _, class in ipairs(redis.call("HKEYS", CLASSES)) do
    if string.match(class, "|([^|]*)$") == model then
      local count = redis.call("ZCOUNT", class_key(class), "-inf", string.format("(%.17g", key))
      if count > 0 then counts[#counts + 1] = { class_key(class), count } end
      total = total + count
    end
  end
  for _, one in ipairs(counts) do
    add_sample(lanes, one[1], one[2], math.ceil(one[2] * math.min(SAMPLE / total, 1)))
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
  for _, lane in ipairs(lanes_of(it.account)) do
    local other = read_lane(lane)
    if other.tier < it.tier then own = own + redis.call("ZCARD", lane_key(lane)) end
    if other.tier == it.tier then own = own + count_before(lane, seq) end
  end
  local run_ms = math.max(tonumber(redis.call("HGET", stats_key("model", it.model), "run_ms") or "1000"), 1)
  local rules = rules_of(it.model)
  local turn = start_of(it) + own * run_ms / terms_of(it.account, rules)
  local jobs, turns = {}, {}
  for _, found in ipairs(lanes_before(it.model, turn)) do
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
  for _, found in ipairs(lanes_before(it.model, key)) do
    others = others + count_in(found[1], it, seq, key, rules) * found[2]
  end
  if obstacle(it.tenant, it.account, rules) then -- Its own lanes are out of the order, but not out of its way.
    for _, lane in ipairs(lanes_of(it.account)) do own = own + count_in(lane, it, seq, key, rules) end
  end
  return own + math.floor(others + 0.5)
end
