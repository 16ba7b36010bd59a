-- groups: which servers can run the jobs of a class.  Servers of one kind serve the same models and declare the same
-- attributes; classes of a model that the same kinds can run form a group, whose index orders them by the key of their
-- first lane.  So an offer reads the head of each group, however many different constraints wait, and never a class
-- that no server can run: such a class is in no group until the registry changes and reindex_lanes looks again.
-- @include lib/constraints
-- @include lib/keys
-- @include lib/slots

local NO_SERVER = "-" -- the kinds of a class that no server can run

local kinds_read = {}

-- Return the kinds of servers that serve the model and meet the constraints.
local function kinds_that_run(model, constraints)
  local name = model .. "\n" .. constraints
  if kinds_read[name] then return kinds_read[name] end
  local found = {}
  for _, kind in ipairs(redis.call("SMEMBERS", model_kinds_key(model))) do
    if meets_constraints(constraints, get_field(KINDS, kind), model) then
      found[#found + 1] = kind
    end
  end
  kinds_read[name] = found
  return found
end

-- Return the same as one short name; NO_SERVER: there is none.
local function kinds_for(model, constraints)
  local found = kinds_that_run(model, constraints)
  if #found == 0 then return NO_SERVER end
  table.sort(found)
  return string.sub(redis.sha1hex(table.concat(found)), 1, 12)
end

local function has_no_constraints(class) return string.sub(class, 1, 1) == "|" end

-- Return the group of a class, nil: it has none; and its constraints.  A class without constraints is its own group.
local function group_of(class)
  if has_no_constraints(class) then return class, "" end
  local kinds, constraints = string.match(redis.call("HGET", CLASSES, class) or "", "^([^\n]*)\n(.*)$")
  return kinds and kinds ~= NO_SERVER and kinds .. "|" .. model_of(class) or nil, constraints
end

-- In a group's index, a class is `<priority of its first lane>|<class>`: of equal keys the more urgent comes first.
local function leave_group(group, class)
  local names = {}
  for priority = 1, 9 do names[priority] = priority .. "|" .. class end
  redis.call("ZREM", group_key(group), unpack(names))
end

local function drop_if_empty(group)
  if redis.call("EXISTS", group_key(group)) == 1 then return end
  redis.call("HDEL", GROUPS, group)
  redis.call("SREM", model_groups_key(model_of(group)), group)
end

-- Return whether models have too many kinds of servers for an index of each.
local function has_many_kinds() return get_field(META, "many_kinds") == "1" end

-- A group has work: an offer has to look at the kinds of servers that serve its model.
local function add_group(group)
  local model = model_of(group)
  redis.call("HSET", GROUPS, group, "")
  if redis.call("SADD", model_groups_key(model), group) == 0 or has_many_kinds() then return end
  for _, kind in ipairs(redis.call("SMEMBERS", model_kinds_key(model))) do mark_ready(kind) end
end

-- Set a class's place in its group by its first lane.
local function rank_class(class)
  if has_no_constraints(class) then return end
  local group = group_of(class)
  local first = group and redis.call("ZRANGE", class_key(class), 0, 0, "WITHSCORES")
  if not first or not first[1] then return end
  leave_group(group, class)
  redis.call("ZADD", group_key(group), first[2], string.sub(first[1], 1, 1) .. "|" .. class)
end

local function add_class(class, constraints)
  if redis.call("HEXISTS", CLASSES, class) == 1 then return end
  local kinds = has_no_constraints(class) and "" or kinds_for(model_of(class), constraints)
  redis.call("HSET", CLASSES, class, kinds .. "\n" .. constraints)
  if kinds ~= NO_SERVER then add_group(kinds .. "|" .. model_of(class)) end
end

-- Remove a class in which no job waits.
local function drop_class(class)
  local group = group_of(class)
  redis.call("HDEL", CLASSES, class)
  if not group then return end
  if group ~= class then leave_group(group, class) end
  drop_if_empty(group)
end

-- Put a class into its group again, after the kinds of servers have changed.
local function regroup(class)
  local before, constraints = group_of(class)
  if not constraints or has_no_constraints(class) then return end
  local kinds = kinds_for(model_of(class), constraints)
  local group = kinds ~= NO_SERVER and kinds .. "|" .. model_of(class) or nil
  if group == before then return end
  if before then
    leave_group(before, class)
    drop_if_empty(before)
  end
  redis.call("HSET", CLASSES, class, kinds .. "\n" .. constraints)
  if group then
    add_group(group)
    rank_class(class)
  end
end

-- Return the first lane of a group as {name, key, constraints, group}; nil: its jobs wait for something other than a
-- slot.
local function first_lane(group)
  local class, constraints = group, ""
  if not has_no_constraints(group) then
    class = string.sub(redis.call("ZRANGE", group_key(group), 0, 0)[1], 3)
    constraints = select(2, group_of(class))
  end
  local first = redis.call("ZRANGE", class_key(class), 0, 0, "WITHSCORES")
  if first[2] == "inf" then return nil end
  return { name = first[1], key = tonumber(first[2]), constraints = constraints, group = group }
end
