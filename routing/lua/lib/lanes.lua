-- lanes: jobs go into their lanes and out of them.  An index for each class (a model and what its jobs need of a
-- server) holds the class's lanes by key, so that an offer finds the next job however many lanes there are.

local BLOCKED = math.huge -- the key of a lane that waits for something other than its turn

-- The names of an account's lanes that hold jobs.
local function lanes_of(account)
  local lanes = {}
  for mark in string.gmatch(redis.call("HGET", LANES, account) or "", "%S+") do
    lanes[#lanes + 1] = mark .. "|" .. account
  end
  return lanes
end

local function note_lane(it, needs)
  redis.call("HSET", CLASSES, it.class, needs)
  redis.call("HSET", LANES, it.account, (redis.call("HGET", LANES, it.account) or "") .. it.mark .. " ")
end

local function forget_lane(it)
  local left = ""
  for mark in string.gmatch(redis.call("HGET", LANES, it.account) or "", "%S+") do
    if mark ~= it.mark then left = left .. mark .. " " end
  end
  if left == "" then redis.call("HDEL", LANES, it.account) else redis.call("HSET", LANES, it.account, left) end
  if redis.call("EXISTS", class_key(it.class)) == 0 then redis.call("HDEL", CLASSES, it.class) end
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

-- Set a lane's place in its class by the job at its head; drop the lane when it is empty.
local function reindex(it, needs)
  local head = redis.call("ZRANGE", lane_key(it.name), 0, 0, "WITHSCORES")
  if not head[1] then
    if redis.call("ZREM", class_key(it.class), it.name) == 1 then forget_lane(it) end
    return
  end
  local key = key_of(it, rules_of(it.model), head[1], head[2])
  local text = key == BLOCKED and "+inf" or string.format("%.17g", key)
  if redis.call("ZADD", class_key(it.class), text, it.name) == 1 then note_lane(it, needs or "") end
end

local function reindex_account(account)
  for _, lane in ipairs(lanes_of(account)) do reindex(read_lane(lane)) end
end

local function count_waiting(model, change)
  local field = "waiting:" .. model
  if redis.call("HINCRBY", META, field, change) == 0 then
    redis.call("HDEL", META, field)
    forget_shares(model)
  end
end

-- Answers whether it was not there yet.  The caller reindexes the lane.
local function add_to_lane(it, seq, job, created)
  if redis.call("ZADD", lane_key(it.name), seq, member_of(job, created)) == 0 then return false end
  count_waiting(it.model, 1)
  return true
end

-- Answers whether it was there.
local function take_from_lane(it, member)
  if redis.call("ZREM", lane_key(it.name), member) == 0 then return false end
  count_waiting(it.model, -1)
  reindex(it)
  return true
end

-- An account holds one slot more, or one less: that may block its lanes, or let them go on; and under `fair` its
-- other lanes move with its tag.
local function count_held(it, change)
  local rules = rules_of(it.model)
  if redis.call("HINCRBY", HELD, it.account, change) <= 0 then redis.call("HDEL", HELD, it.account) end
  local _, limit = terms_of(it.account, rules)
  if rules.policy == "fair" or limit > 0 then reindex_account(it.account) end
end
