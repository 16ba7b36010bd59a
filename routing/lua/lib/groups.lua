-- groups: which servers may run the jobs of a class.  Servers of one kind serve the same models and declare the same;
-- classes of a model that the same kinds may run form a group, whose index holds them by the key of their first lane.
-- So an offer looks at the head of each group, however many different constraints wait, and never at those that no
-- server here meets: they are in no group until a change of the registry lets sync look again.

local NOWHERE = "-" -- the kinds of a class that no server here can run

-- As routing/admission/constraints.py reads numbers: tonumber() alone would take 0x10 and nan for some.
local function number_in(text) return string.find(text, "^%-?%d[%d.]*[eE]?[-+]?%d*$") and tonumber(text) end

-- `constraints` has a condition a line: `gpu=A100,H100` (one of these) or `memory>=40`.  A server that does not declare
-- what is asked for does not meet it; an attribute of the model (`zimg:version`) goes before one of the server.
local function matches(constraints, entry, model)
  if constraints == "" then return true end
  for name, operator, wanted in string.gmatch(constraints, "([^<>=\n]+)([<>]?=)([^\n]*)") do
    local has = nil
    for _, prefix in ipairs({ "\n@" .. model .. ":" .. name .. "=", "\n@" .. name .. "=" }) do
      local _, stop = string.find(entry, prefix, 1, true)
      if stop and not has then has = string.match(entry, "^[^\n]*", stop + 1) end
    end
    if not has then return false end
    if operator == ">=" or operator == "<=" then
      local number, bound = number_in(has), number_in(wanted)
      if not number or not bound or (operator == ">=" and number < bound) then return false end
      if operator == "<=" and number > bound then return false end
    else
      local met = false
      for one in string.gmatch(wanted, "[^,]+") do
        met = met or string.find("," .. has .. ",", "," .. one .. ",", 1, true) ~= nil
      end
      if not met then return false end
    end
  end
  return true
end

local function serves(entry, model) return string.find(entry, "\n" .. model .. "\n", 1, true) ~= nil end

local kinds_read

-- The kinds of servers that serve the model and meet the constraints, as one short name; NOWHERE: there are none.
local function kinds_for(model, constraints)
  kinds_read = kinds_read or redis.call("HGETALL", KINDS)
  local found = {}
  for i = 1, #kinds_read, 2 do
    if serves(kinds_read[i + 1], model) and matches(constraints, kinds_read[i + 1], model) then
      found[#found + 1] = kinds_read[i]
    end
  end
  if #found == 0 then return NOWHERE end
  table.sort(found)
  return string.sub(redis.sha1hex(table.concat(found)), 1, 12)
end

local function asks_nothing(class) return string.sub(class, 1, 1) == "|" end

-- The group of a class, nil: none; and what its jobs need.  A class that asks for nothing is a group by itself.
local function group_of(class)
  if asks_nothing(class) then return class, "" end
  local kinds, constraints = string.match(redis.call("HGET", CLASSES, class) or "", "^([^\n]*)\n(.*)$")
  return kinds and kinds ~= NOWHERE and kinds .. "|" .. model_of(class) or nil, constraints
end

-- In a group's index a class stands as `<priority of its first lane>|<class>`: of equal keys the more urgent comes
-- first.
local function leave_group(group, class)
  local names = {}
  for priority = 1, 9 do names[priority] = priority .. "|" .. class end
  redis.call("ZREM", group_key(group), unpack(names))
end

local function drop_if_empty(group)
  if redis.call("EXISTS", group_key(group)) == 0 then redis.call("HDEL", GROUPS, group) end
end

-- Set a class's place in its group by its first lane.
local function rank_class(class)
  if asks_nothing(class) then return end
  local group = group_of(class)
  local first = group and redis.call("ZRANGE", class_key(class), 0, 0, "WITHSCORES")
  if not first or not first[1] then return end
  leave_group(group, class)
  redis.call("ZADD", group_key(group), first[2], string.sub(first[1], 1, 1) .. "|" .. class)
end

local function add_class(class, constraints)
  if redis.call("HEXISTS", CLASSES, class) == 1 then return end
  local kinds = asks_nothing(class) and "" or kinds_for(model_of(class), constraints)
  redis.call("HSET", CLASSES, class, kinds .. "\n" .. constraints)
  if kinds ~= NOWHERE then redis.call("HSET", GROUPS, kinds .. "|" .. model_of(class), "") end
end

-- No job of a class waits any more.
local function drop_class(class)
  local group = group_of(class)
  redis.call("HDEL", CLASSES, class)
  if not group then return end
  if group ~= class then leave_group(group, class) end
  drop_if_empty(group)
end

-- The registry has changed: other servers may run the jobs of a class now.
local function regroup(class)
  local before, constraints = group_of(class)
  if not constraints or asks_nothing(class) then return end
  local kinds = kinds_for(model_of(class), constraints)
  local group = kinds ~= NOWHERE and kinds .. "|" .. model_of(class) or nil
  if group == before then return end
  if before then
    leave_group(before, class)
    drop_if_empty(before)
  end
  redis.call("HSET", CLASSES, class, kinds .. "\n" .. constraints)
  if group then
    redis.call("HSET", GROUPS, group, "")
    rank_class(class)
  end
end

-- The first lane of a group as {name, key, constraints}; nil: what its jobs wait for is something other than a slot.
local function first_lane(group)
  local class, constraints = group, ""
  if not asks_nothing(group) then
    class = string.sub(redis.call("ZRANGE", group_key(group), 0, 0)[1], 3)
    constraints = select(2, group_of(class))
  end
  local first = redis.call("ZRANGE", class_key(class), 0, 0, "WITHSCORES")
  if first[2] == "inf" then return nil end
  return { name = first[1], key = tonumber(first[2]), constraints = constraints, group = group }
end
