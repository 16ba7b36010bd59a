-- lanes: put jobs into lanes, and take them out.  The index of a class (a model and constraints) orders its lanes by
-- key, and the index of a group its classes, so that an offer finds the next job however many lanes there are.
-- @include lib/groups
-- @include lib/policies

local BLOCKED = 1 / 0 -- the key of a lane that waits for something other than its turn

-- The names of an account's lanes that hold jobs.
local function lanes_of(account)
  local lanes = redis.call("HKEYS", account_lanes_key(account))
  for i, mark in ipairs(lanes) do lanes[i] = mark .. "|" .. account end
  return lanes
end

local function register_lane(lane, constraints)
  redis.call("HSET", account_lanes_key(lane.account), lane.mark, "")
  add_class(lane.class, constraints)
end

local function unregister_lane(lane)
  redis.call("HDEL", account_lanes_key(lane.account), lane.mark)
  if redis.call("EXISTS", class_key(lane.class)) == 0 then drop_class(lane.class) else rank_class(lane.class) end
end

local function lane_order_key(lane, member, score)
  local rules, policy = rules_of(lane.model), policy_of(lane.model)
  if tenant_blocked_by(lane.tenant, lane.account, rules) then return BLOCKED end
  if policy.account_key then return policy.account_key(lane) end
  local _, created = parse_lane_member(member)
  return policy.head_key(lane.priority, tonumber(score), created, rules)
end

local function key_text(key) return key == BLOCKED and "+inf" or string.format("%.17g", key) end

-- Set a lane's place in its class by the job at its head; remove an empty lane.  `head`: member and score of that job,
-- if they are known; an empty table: there is none.
local function reindex(lane, constraints, head)
  head = head or redis.call("ZRANGE", lane_key(lane.name), 0, 0, "WITHSCORES")
  if not head[1] then
    if redis.call("ZREM", class_key(lane.class), lane.name) == 1 then unregister_lane(lane) end
    return
  end
  local key = lane_order_key(lane, head[1], head[2])
  local is_new = redis.call("ZADD", class_key(lane.class), key_text(key), lane.name) == 1
  if is_new then register_lane(lane, constraints or "") end
  rank_class(lane.class)
end

-- Set the keys of an account's lanes, class by class, where the lanes of a class have one key.
local function set_keys(classes, key_for)
  for class, lanes in pairs(classes) do
    local key, pairs_of = key_text(key_for(lanes[1])), {}
    for i, lane in ipairs(lanes) do
      pairs_of[2 * i - 1], pairs_of[2 * i] = key, lane.name
    end
    redis.call("ZADD", class_key(class), unpack(pairs_of))
    rank_class(class)
  end
end

local function reindex_account(account)
  local classes, first = {}, nil
  for _, name in ipairs(lanes_of(account)) do
    local lane = parse_lane(name)
    classes[lane.class] = classes[lane.class] or {}
    table.insert(classes[lane.class], lane)
    first = first or lane
  end
  if not first then return end
  local policy = policy_of(first.model)
  if tenant_blocked_by(first.tenant, account, rules_of(first.model)) then
    set_keys(classes, function() return BLOCKED end)
  elseif policy.account_key then
    set_keys(classes, policy.account_key)
  else
    for _, lanes in pairs(classes) do
      for _, lane in ipairs(lanes) do reindex(lane) end
    end
  end
end

local function add_waiting(lane, change)
  if redis.call("HINCRBY", LANES, lane.account, change) == 0 then redis.call("HDEL", LANES, lane.account) end
  local name = "waiting:" .. lane.model
  if increment_field(META, name, change) ~= 0 then return end
  set_field(META, name, false)
  local policy = policy_of(lane.model)
  if policy.forget then policy.forget(lane.model) end
end

-- Put jobs into a lane: score and member of each.  Returns how many were not there yet.  The caller reindexes the lane.
local function add_to_lane(lane, ...)
  local added = redis.call("ZADD", lane_key(lane.name), ...)
  if added > 0 then add_waiting(lane, added) end
  return added
end

-- Returns whether the job was there.  `head`: of the lane without it, as for reindex.
local function remove_from_lane(lane, member, head)
  if redis.call("ZREM", lane_key(lane.name), member) == 0 then return false end
  add_waiting(lane, -1)
  reindex(lane, "", head)
  return true
end

-- Change a count of slots, and return whether it comes to its limit, or falls below it.  `limit` nil: there is none.
local function add_slots(name, change, limit)
  local held = increment_field(HELD, name, change)
  if held <= 0 then set_field(HELD, name, false) end
  return limit and math.max(held, held - change) == limit
end

-- An account holds one slot more, or one less.  That may block its lanes, or unblock them, also those of its tenant's
-- other models; and where keys are of accounts, its other lanes move with what the account has been charged.
local function add_held(lane, change)
  local rules, most = rules_of(lane.model), slots_of_tenant(lane.tenant)
  local _, limit = weight_and_slot_limit(lane.account, rules)
  local of_account = add_slots(lane.account, change, limit > 0 and limit or nil)
  if most and add_slots(lane.tenant, change, most) then
    for model in string.gmatch(get_field(META, "models") or "", "[^\n]+") do
      reindex_account(lane.tenant .. "|" .. model)
    end
  elseif of_account or policy_called(rules.policy).account_key then
    reindex_account(lane.account)
  end
end
