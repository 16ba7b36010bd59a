-- lanes: jobs go into their lanes and out of them.  An index for each class (a model and what its jobs need of a
-- server) holds the class's lanes by key, and one for each group its classes, so that an offer finds the next job
-- however many lanes there are.

local BLOCKED = 1 / 0 -- the key of a lane that waits for something other than its turn

-- The names of an account's lanes that hold jobs.
local function lanes_of(account)
  local lanes = redis.call("HKEYS", marks_key(account))
  for i, mark in ipairs(lanes) do lanes[i] = mark .. "|" .. account end
  return lanes
end

local function note_lane(it, needs)
  redis.call("HSET", marks_key(it.account), it.mark, "")
  add_class(it.class, needs)
end

local function forget_lane(it)
  redis.call("HDEL", marks_key(it.account), it.mark)
  if redis.call("EXISTS", class_key(it.class)) == 0 then drop_class(it.class) else rank_class(it.class) end
end

-- When an account's next job starts under a fair share, for all its lanes of a class alike.  Virtual time goes on
-- without a class whose servers are rare; who waits there keeps its place, also when it submits more.
local function start_of(it)
  local since, lanes = virtual_time(it.model), {}
  for tier = 1, 9 do lanes[tier] = tier .. "|" .. it.digest .. "|" .. it.account end
  for _, key in ipairs(redis.call("ZMSCORE", class_key(it.class), unpack(lanes))) do
    if key then since = math.min(since, tonumber(key)) end
  end
  return math.max(since, tag_of(it.tenant, it.model))
end

local function key_of(it, rules, member, seq)
  if obstacle(it.tenant, it.account, rules) then return BLOCKED end
  local _, created = read_member(member)
  local head = { tier = it.tier, seq = tonumber(seq), created = created }
  if rules.policy == "fair" then head.start = start_of(it) end
  return KEY_OF[rules.policy](head, rules)
end

local function key_text(key) return key == BLOCKED and "+inf" or string.format("%.17g", key) end

-- Set a lane's place in its class by the job at its head; drop the lane when it is empty.  `head`: member and seq of
-- that job, if they are known; empty: it has none.
local function reindex(it, needs, head)
  head = head or redis.call("ZRANGE", lane_key(it.name), 0, 0, "WITHSCORES")
  if not head[1] then
    if redis.call("ZREM", class_key(it.class), it.name) == 1 then forget_lane(it) end
    return
  end
  local key = key_of(it, rules_of(it.model), head[1], head[2])
  if redis.call("ZADD", class_key(it.class), key_text(key), it.name) == 1 then note_lane(it, needs or "") end
  rank_class(it.class)
end

-- Set the lanes of an account by class: they have one key where it does not come from the job at their head.
local function set_keys(classes, key_for)
  for class, lanes in pairs(classes) do
    local key, pairs_of = key_text(key_for(lanes[1])), {}
    for i, it in ipairs(lanes) do
      pairs_of[2 * i - 1], pairs_of[2 * i] = key, it.name
    end
    redis.call("ZADD", class_key(class), unpack(pairs_of))
    rank_class(class)
  end
end

local function reindex_account(account)
  local classes, first = {}, nil
  for _, lane in ipairs(lanes_of(account)) do
    local it = read_lane(lane)
    classes[it.class] = classes[it.class] or {}
    table.insert(classes[it.class], it)
    first = first or it
  end
  if not first then return end
  local rules = rules_of(first.model)
  if obstacle(first.tenant, account, rules) then
    set_keys(classes, function() return BLOCKED end)
  elseif rules.policy == "fair" then
    set_keys(classes, start_of)
  else
    for _, lanes in pairs(classes) do
      for _, it in ipairs(lanes) do reindex(it) end
    end
  end
end

local function count_waiting(it, change)
  if redis.call("HINCRBY", LANES, it.account, change) == 0 then redis.call("HDEL", LANES, it.account) end
  local name = "waiting:" .. it.model
  if add_to_field(META, name, change) == 0 then
    set_field(META, name, false)
    forget_shares(it.model)
  end
end

-- Put jobs into a lane: seq and member of each; answers how many were not there yet.  The caller reindexes the lane.
local function add_to_lane(it, ...)
  local added = redis.call("ZADD", lane_key(it.name), ...)
  if added > 0 then count_waiting(it, added) end
  return added
end

-- Answers whether it was there.  `head`: of the lane without it, as for reindex.
local function take_from_lane(it, member, head)
  if redis.call("ZREM", lane_key(it.name), member) == 0 then return false end
  count_waiting(it, -1)
  reindex(it, "", head)
  return true
end

-- An account holds one slot more, or one less: that may block its lanes, or let them go on; and under `fair` its
-- other lanes move with its tag.
local function count_held(it, change)
  local rules = rules_of(it.model)
  local held = add_to_field(HELD, it.account, change)
  if held <= 0 then set_field(HELD, it.account, false) end
  local _, limit = terms_of(it.account, rules)
  local turns = limit > 0 and math.max(held, held - change) == limit
  if rules.policy == "fair" or turns then reindex_account(it.account) end
end
